// Files of the page and of its models. Each is used and kept only if it is the file that the page was built with: a host
// or a network in between may answer 200 with an error page, a login page, or half of a file.

const subtle = globalThis.crypto?.subtle; // browsers hash on https and localhost alone

/** Whether files are compared by their SHA-256; else by their size alone. */
export const canHash = Boolean(subtle);

/**
 * Read a file from the store, else from the network and into the store.
 * @param {Cache | undefined} store without one, nothing is kept
 * @param {string} url
 * @param {{ size_bytes: number, sha256: string }} expected
 * @param {(bytes: number) => void} onBytes called with the size of each part
 * @returns {Promise<{ bytes: Uint8Array, headers: Headers, isKept: boolean }>}
 */
export async function load(store, url, expected, onBytes = () => {}) {
  const kept = await store?.match(url);
  if (kept) {
    const bytes = await read(kept, expected, onBytes).catch(() => undefined); // a damaged store fails here
    if (bytes) return { bytes, headers: kept.headers, isKept: true };
    await store.delete(url);
  }
  // The second request passes by what the browser remembers of earlier answers.
  for (const cache of ["default", "reload"]) {
    const response = await fetch(url, { cache });
    if (!response.ok) throw new Error(`${url} cannot be loaded: the server answers ${response.status}.`);
    const bytes = await read(response, expected, onBytes);
    if (!bytes) continue;
    const headers = new Headers(response.headers);
    headers.delete("content-encoding"); // the bytes are decoded
    headers.delete("content-length");
    // A full disk costs only time.
    const isKept = Boolean(await store?.put(url, new Response(bytes, { headers })).then(() => true, () => false));
    return { bytes, headers, isKept };
  }
  throw new Error(`${url} is not the file that this page was built with, so it is not used: reload the page later.`);
}

/** The bytes of a response; undefined if they are not those of the file. */
async function read(response, { size_bytes, sha256 }, onBytes) {
  if (!response.body) return undefined;
  const bytes = new Uint8Array(size_bytes);
  let length = 0;
  for (let part, stream = response.body.getReader(); !(part = await stream.read()).done; ) {
    if (length + part.value.length > size_bytes) {
      stream.cancel().catch(() => undefined);
      return undefined;
    }
    bytes.set(part.value, length);
    length += part.value.length;
    onBytes(part.value.length);
  }
  if (length < size_bytes) return undefined;
  const hash = subtle && hexadecimal(await subtle.digest("SHA-256", bytes));
  return [undefined, sha256].includes(hash) ? bytes : undefined;
}

function hexadecimal(buffer) {
  return Array.from(new Uint8Array(buffer), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
