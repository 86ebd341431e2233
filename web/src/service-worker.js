// Keeps the page itself, so that it opens without a network. The models are kept by the worker that loads them, in the
// same store; esbuild puts in the version, a hash of all files, the list of the page's own, and the models' folders.

/* global VERSION, FILES, MODELS */

self.addEventListener("install", (event) => {
  // The host is asked whether they changed: what the browser remembers of earlier requests may be of another version.
  const files = FILES.map((name) => new Request(name, { cache: "no-cache" }));
  event.waitUntil(caches.open(VERSION).then((store) => store.addAll(files)));
});

/** Keep an earlier version's files of models that are still the same, and drop the rest of its store. */
async function takeOver(name) {
  const [store, earlier] = [await caches.open(VERSION), await caches.open(name)];
  for (const request of await earlier.keys()) {
    if (!MODELS.some((folder) => request.url.includes(`/${folder}`))) continue;
    await store.put(request, await earlier.match(request)).catch(() => undefined); // a full disk costs only time
  }
  await caches.delete(name);
}

self.addEventListener("activate", (event) => {
  const others = (names) => names.filter((name) => name.startsWith("t5accel-") && name !== VERSION);
  event.waitUntil(
    caches.keys().then((names) => Promise.all(others(names).map(takeOver))).then(() => clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  const kept = caches.open(VERSION).then((store) => store.match(event.request, { ignoreSearch: true }));
  event.respondWith(kept.then((response) => response ?? fetch(event.request)));
});
