"""In which numbers a model is stored and multiplied: named recipes, and exports in fp16 and integers."""
