"""One runtime each; every one satisfies `t5accel.decoding.backend.Backend`."""
