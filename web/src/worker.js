// The model, in a thread of its own, so that the page stays alive while it computes. One worker holds one model; the
// page ends it to change the model.

import { env } from "onnxruntime-web/wasm";
import { canHash, load } from "./files.js";
import { T5 } from "./t5.js";

const WARM_UP_TOKENS = 4;

let t5, maxSourceTokens, stopped;
let isKept = true; // all that was read is in the browser's store

async function open({ folder, files, wasm, version, bytes, warmUp, limit }) {
  const start = performance.now();
  const store = await self.caches?.open(version).catch(() => undefined); // no store on plain http, or in private
  let loaded = 0;
  const read = async (url, expected) => {
    const file = await load(store, url, expected, (more) => {
      loaded += more;
      postMessage({ type: "progress", loaded: Math.min(loaded / bytes, 1) });
    });
    isKept &&= file.isKept;
    return file.bytes;
  };
  env.wasm.wasmBinary = await read(wasm.file, wasm);
  t5 = await T5.open((name) => read(folder + name, files[name]));
  postMessage({ type: "warming" }); // the first steps of a session take several times as long
  for await (const _ of t5.generate(t5.encode(warmUp), { maxNewTokens: WARM_UP_TOKENS }));
  maxSourceTokens = limit;
  postMessage({ type: "ready", seconds: (performance.now() - start) / 1000, isKept, isHashed: canHash });
}

async function generate({ text, maxNewTokens, id }) {
  const start = performance.now();
  const source = t5.encode(text);
  if (source.length > maxSourceTokens) {
    const message = `This text has ${source.length} tokens, and the page takes ${maxSourceTokens}: shorten it.`;
    return postMessage({ type: "refused", id, message });
  }
  const tokens = [];
  let first, last;
  stopped = false;
  for await (const token of t5.generate(source, { maxNewTokens })) {
    last = performance.now();
    first ??= last;
    tokens.push(token);
    postMessage({ type: "token", id, text: t5.decode(tokens) });
    await messages();
    if (stopped) break;
  }
  const perToken = tokens.length > 1 ? (last - first) / (tokens.length - 1) : undefined;
  postMessage({ type: "done", id, tokens, text: t5.decode(tokens), stopped, firstMs: first - start, perToken });
}

/** Let messages in, such as "stop": the runtime's promises alone never do. */
const channel = new MessageChannel();
function messages() {
  return new Promise((resolve) => {
    channel.port1.onmessage = resolve;
    channel.port2.postMessage(null);
  });
}

const orders = { open, generate, stop: () => void (stopped = true) };

self.onmessage = async ({ data }) => {
  try {
    await orders[data.type](data);
  } catch (error) {
    postMessage({ type: "failed", id: data.id, message: error.message ?? String(error) });
  }
};
