// Keeps the page itself, so that it opens without a network. The models are kept by the worker that loads them, in the
// same store; esbuild puts in the version, a hash of all files, and the list of the page's own.

/* global VERSION, FILES */

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(VERSION).then((store) => store.addAll(FILES)));
});

self.addEventListener("activate", (event) => {
  const others = (names) => names.filter((name) => name.startsWith("t5accel-") && name !== VERSION);
  event.waitUntil(
    caches.keys().then((names) => Promise.all(others(names).map((name) => caches.delete(name)))).then(() => clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  const kept = caches.open(VERSION).then((store) => store.match(event.request, { ignoreSearch: true }));
  event.respondWith(kept.then((response) => response ?? fetch(event.request)));
});
