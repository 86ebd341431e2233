"""Print the licences of the packages whose files are part of the site; run by the environment that builds it."""

from importlib.metadata import files

for name in ("sphinx", "pygments", "snowballstemmer", "furo", "myst-nb"):
    texts = [path for path in files(name) or () if path.name.upper().startswith(("LICENSE", "COPYING"))]
    if not texts:
        raise SystemExit(f"{name} comes without its licence.")
    print("=" * 80, name, "=" * 80, "", *(path.read_text(encoding="utf-8") for path in texts), sep="\n")
