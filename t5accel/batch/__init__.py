"""Files of texts answered shard by shard, so that a job may be killed at any moment and goes on."""
