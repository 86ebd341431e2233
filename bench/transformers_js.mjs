// transformers.js on onnxruntime-node, asked by bench/peer_worker.py line by line on standard input.
// Arguments: the folder with node_modules, that of the model, the kind of its numbers, and threads.
import { createRequire } from "node:module";
import { basename, dirname } from "node:path";
import { createInterface } from "node:readline";

const [modules, folder, dtype, threads] = process.argv.slice(2);
const { AutoModelForSeq2SeqLM, Tensor, env } = createRequire(`${modules}/`)("@huggingface/transformers");
env.allowRemoteModels = false;
env.localModelPath = dirname(folder);
const session_options = { intraOpNumThreads: Number(threads), interOpNumThreads: 1 };
const model = await AutoModelForSeq2SeqLM.from_pretrained(basename(folder), { dtype, device: "cpu", session_options });

for await (const line of createInterface({ input: process.stdin })) {
  const { ids, least, most } = JSON.parse(line);
  const shape = [ids.length, ids[0].length];
  const whole = (numbers) => new Tensor("int64", BigInt64Array.from(numbers, BigInt), shape);
  const found = await model.generate({
    inputs: whole(ids.flat()), attention_mask: whole(ids.flat().fill(1)), do_sample: false,
    min_new_tokens: least, max_new_tokens: most,
  });
  console.log(JSON.stringify({ tokens: found.tolist().map((row) => row.slice(1).map(Number)) }));
}
