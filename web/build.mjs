// Bundle the page into a folder that holds its models already (scripts/web_models.py): node build.mjs FOLDER

import { createHash } from "node:crypto";
import { appendFile, copyFile, readdir, readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const [out] = process.argv.slice(2);
const here = import.meta.dirname;
const source = (name) => path.join(here, "src", name);
const WASM = "ort-wasm-simd-threaded.wasm";
const LICENCES = "LICENSES.txt";
// Packages without a text of their own: scripts/web_models.py has written their licences.
const WRITTEN = ["onnxruntime-web"];

async function describe(name) {
  const bytes = await readFile(path.join(out, name));
  return { size_bytes: bytes.length, sha256: createHash("sha256").update(bytes).digest("hex") };
}

/** The licence of a package in full; without one it is not bundled. */
async function licence(name) {
  const folder = path.join(here, "node_modules", name);
  const { version, license } = JSON.parse(await readFile(path.join(folder, "package.json"), "utf-8"));
  const files = (await readdir(folder)).filter((file) => /^(licen[sc]e|notice)/i.test(file));
  if (!files.some((file) => /^licen[sc]e/i.test(file))) throw new Error(`${name} has no licence text: find it first.`);
  const texts = await Promise.all(files.map((file) => readFile(path.join(folder, file), "utf-8")));
  const line = "=".repeat(80);
  return `${line}\n${[name, version, license].filter(Boolean).join(", ")}\n${line}\n\n${texts.join("\n\n")}\n\n`;
}

const options = { bundle: true, format: "esm", target: "es2022", minify: true, metafile: true, outdir: out };
const notice = `/*! Licences of what is bundled here: ${LICENCES} */`;
Object.assign(options, { legalComments: "none", banner: { js: notice, css: notice }, logLevel: "warning" });
const bundled = await build({ ...options, entryPoints: ["app.js", "worker.js", "style.css"].map(source) });
await copyFile(fileURLToPath(import.meta.resolve(`onnxruntime-web/${WASM}`)), path.join(out, WASM));
await copyFile(source("index.html"), path.join(out, "index.html"));

const inputs = Object.keys(bundled.metafile.inputs).map((file) => file.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1]);
const written = await readFile(path.join(out, LICENCES), "utf-8");
for (const name of WRITTEN) if (!written.includes(name)) throw new Error(`${LICENCES} has no licence of ${name}.`);
for (const name of new Set(inputs.filter((name) => name && !WRITTEN.includes(name))))
  await appendFile(path.join(out, LICENCES), await licence(name));

const page = JSON.parse(await readFile(path.join(out, "page.json"), "utf-8")); // which has the hashes of the models' files
page.wasm = { file: WASM, ...(await describe(WASM)) };
const shell = ["index.html", "app.js", "worker.js", "style.css"];
const files = Object.fromEntries(await Promise.all(shell.map(async (name) => [name, await describe(name)])));
const hash = createHash("sha256").update(JSON.stringify([files, page]));
page.version = `t5accel-${hash.digest("hex").slice(0, 16)}`;
await writeFile(path.join(out, "page.json"), JSON.stringify(page));

const define = {
  VERSION: JSON.stringify(page.version),
  FILES: JSON.stringify({ "./": files["index.html"], "page.json": await describe("page.json"), ...files }),
  MODELS: JSON.stringify([WASM, ...page.models.map(({ folder }) => folder)]),
};
await build({ ...options, entryPoints: [source("service-worker.js")], define, format: "iife" });
