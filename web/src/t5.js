// How to use an export of t5accel from another language: two ONNX graphs, a tokenizer, and a manifest that says which
// tensors go in and out. Nothing here depends on the model's sizes or its vocabulary.
//
//   encoder.onnx   the source -> keys and values of cross-attention, once
//   decoder.onnx   one new token and the history -> logits and the history with that token, once for each token
//
// `decoder_step.onnx` and `decoder_shortlist.onnx`, where an export has them, are faster paths that need ONNX Runtime on
// a CPU. These two graphs are the portable ones.

import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-web/wasm";

// More threads need a page that the server isolates from other origins, by headers that a static host may not send.
ort.env.wasm.numThreads = 1;

const [ENCODER, DECODER, WEIGHTS] = ["encoder.onnx", "decoder.onnx", "weights.data"];

export class T5 {
  /**
   * Open an export.
   * @param {(name: string) => Promise<Uint8Array>} read the bytes of one of its files
   */
  static async open(read) {
    const json = async (name) => JSON.parse(new TextDecoder().decode(await read(name)));
    const t5 = new T5();
    t5.manifest = await json("manifest.json");
    if (t5.manifest.format !== 2) throw new Error(`The manifest has format ${t5.manifest.format}; this code reads 2.`);
    t5.tokenizer = new Tokenizer(await json("tokenizer.json"), await json("tokenizer_config.json"));
    // Both graphs read the same file of weights.
    const externalData = WEIGHTS in t5.manifest.files ? [{ path: WEIGHTS, data: await read(WEIGHTS) }] : [];
    const session = async (name) => ort.InferenceSession.create(await read(name), { externalData });
    t5.encoder = await session(ENCODER);
    t5.decoder = await session(DECODER);
    return t5;
  }

  /** The ids of a text, with the end token that the tokenizer adds. */
  encode(text) {
    return this.tokenizer.encode(text).ids;
  }

  /** The text of ids, without special tokens. */
  decode(tokens) {
    return this.tokenizer.decode(tokens, { skip_special_tokens: true });
  }

  /** Greedy search: the ids of the answer, one by one, the end token included. */
  async *generate(source, { maxNewTokens = 64 } = {}) {
    const { tokens, rules = {}, graphs } = this.manifest;
    const attention_mask = int64(source.map(() => 1), [1, source.length]);
    const cross = await this.encoder.run({ input_ids: int64(source, [1, source.length]), attention_mask });
    let past = emptyPast(graphs[DECODER].inputs);
    let token = tokens.decoder_start_token_id;
    for (let length = 0; length < maxNewTokens && (token !== tokens.eos_token_id || !length); length++) {
      const { logits, ...present } = await this.decoder.run({
        input_ids: int64([token], [1, 1, 1]),
        past_mask: int64(new Array(length).fill(1), [1, 1, length]),
        attention_mask,
        ...past,
        ...cross,
      });
      token = forced(rules, length, maxNewTokens) ?? likeliest(logits.data, rules.suppress_tokens);
      past = Object.fromEntries(Object.keys(past).map((name) => [name, present[name.replace("past", "present")]]));
      yield token;
    }
  }
}

function int64(numbers, shape) {
  return new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), shape);
}

/** The history before the first token: tensors of one source (B), one row (K) and no columns (P). */
function emptyPast(inputs) {
  const sizes = { B: 1, K: 1, P: 0 };
  const past = inputs.filter(({ name }) => /^past_(key|value)_/.test(name));
  const empty = ({ dtype, shape }) => new ort.Tensor(dtype, [], shape.map((size) => sizes[size] ?? size));
  return Object.fromEntries(past.map((tensor) => [tensor.name, empty(tensor)]));
}

/** The token that the model's rules ask for here, if any: some families begin with a language or close a full answer. */
function forced(rules, length, maxNewTokens) {
  if (length === maxNewTokens - 1 && rules.forced_eos_token_id !== undefined) return rules.forced_eos_token_id;
  return length === 0 ? rules.forced_bos_token_id : undefined;
}

function likeliest(logits, suppressed = []) {
  for (const token of suppressed) logits[token] = -Infinity;
  let best = 0;
  for (let token = 1; token < logits.length; token++) if (logits[token] > logits[best]) best = token;
  return best;
}
