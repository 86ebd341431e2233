// On plain http browsers hash nothing: files are compared by their sizes, and the page is told so.

import assert from "node:assert/strict";
import { test } from "node:test";

Object.defineProperty(globalThis, "crypto", { value: {} });
const { canHash, load } = await import("../src/files.js");

test("without https the size alone is compared", async () => {
  assert.equal(canHash, false);
  const expected = { size_bytes: 3, sha256: "unknown" };
  globalThis.fetch = async () => new Response("abc");
  assert.equal((await load(undefined, "file", expected)).bytes.length, 3);
  for (const wrong of ["ab", "abcd", ""]) {
    globalThis.fetch = async () => new Response(wrong);
    await assert.rejects(load(undefined, "file", expected), /not the file that this page was built with/);
  }
});
