// Bundle the page into a folder that holds its models already (scripts/web_models.py): node build.mjs FOLDER

import { createHash } from "node:crypto";
import { copyFile, readFile, stat, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const [out] = process.argv.slice(2);
const here = import.meta.dirname;
const source = (name) => path.join(here, "src", name);
const WASM = "ort-wasm-simd-threaded.wasm";

const options = { bundle: true, format: "esm", target: "es2022", minify: true, legalComments: "linked", outdir: out };
await build({ ...options, entryPoints: ["app.js", "worker.js", "style.css"].map(source), logLevel: "warning" });
await copyFile(fileURLToPath(import.meta.resolve(`onnxruntime-web/${WASM}`)), path.join(out, WASM));
await copyFile(source("index.html"), path.join(out, "index.html"));

const page = JSON.parse(await readFile(path.join(out, "page.json"), "utf-8"));
page.wasm = { file: WASM, bytes: (await stat(path.join(out, WASM))).size };
const shell = ["index.html", "app.js", "worker.js", "style.css", WASM];
const hash = createHash("sha256");
const models = page.models.map(({ folder }) => `${folder}manifest.json`); // which has the hash of every other file
for (const name of [...shell, ...models]) hash.update(await readFile(path.join(out, name)));
page.version = `t5accel-${hash.update(JSON.stringify(page)).digest("hex").slice(0, 16)}`;
await writeFile(path.join(out, "page.json"), JSON.stringify(page));

const define = {
  VERSION: JSON.stringify(page.version),
  FILES: JSON.stringify(["./", "page.json", ...shell]),
  MODELS: JSON.stringify(page.models.map(({ folder }) => folder)),
};
await build({ ...options, entryPoints: [source("service-worker.js")], define, format: "iife" });
