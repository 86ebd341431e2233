"""Write metadata.t5accel into notebooks: python nb_meta.py [notebooks/NN…]"""
import json, sys
from pathlib import Path
M = {
 "00": ("My model is slow, and I do not know where the time goes.", ["measuring", "profiling"], ["translation", "summaries", "questions"], ["CPU"], 60),
 "01": ("Every token takes longer than the one before.", ["key/value cache"], ["translation", "summaries", "questions"], ["CPU"], 60),
 "02": ("Tokenising, or transformers' dropped pipelines, are in my way.", ["tokenizers", "pipelines"], ["translation", "summaries"], ["CPU"], 45),
 "03": ("I want to run a T5 without PyTorch, from Python or another language.", ["ONNX export"], ["any"], ["CPU"], 60),
 "04": ("Tensors are copied between two steps.", ["IOBinding"], ["any"], ["CPU"], 60),
 "05": ("My exported graph is no faster than PyTorch.", ["graph optimisation", "fused operators"], ["any"], ["CPU"], 50),
 "06": ("In 16 bits it says nonsense, or is no faster.", ["fp16", "bf16"], ["translation", "summaries", "questions"], ["CPU"], 60),
 "07": ("The model is too large, or reads too much memory per token.", ["int8", "int4", "quality gate"], ["translation", "summaries", "questions"], ["CPU"], 60),
 "08": ("I have examples, and want a smaller model that does the same.", ["distillation"], ["translation", "summaries", "questions"], ["CPU"], 60),
 "09": ("I suspect that half of the model does nothing for my task.", ["pruning"], ["translation", "summaries", "questions"], ["CPU"], 60),
 "10": ("I need beams, samples or streams, and they take long.", ["beam search", "shortlist", "speculative decoding", "streaming"], ["translation", "summaries", "questions"], ["CPU"], 60),
 "11": ("My GPU waits for my CPU.", ["CUDA graphs", "TensorRT"], ["any"], ["CPU", "GPU"], 60),
 "12": ("My model is a BART, Marian, NLLB or Pegasus.", ["model families"], ["translation", "summaries"], ["CPU"], 45),
 "14": ("Many people ask at once.", ["continuous batching", "serving", "Triton"], ["translation", "summaries"], ["CPU"], 60),
 "15": ("Which way is the fastest for me, and which claims can I believe?", ["measuring", "scoreboard"], ["translation", "summaries", "questions"], ["CPU"], 50),
}
for p in sorted(Path("notebooks").glob("*.ipynb")):
    if p.name[:2] not in M: print("no metadata for", p); continue
    text = p.read_text(encoding="utf-8"); d = json.loads(text)
    styles = [dict(indent=1, ensure_ascii=a) for a in (False, True)]
    style = next((s for s in styles if json.dumps(d, **s) + "\n" == text), None)
    if style is None: print("another style", p); continue
    problem, technique, task, hardware, minutes = M[p.name[:2]]
    d["metadata"]["t5accel"] = dict(problem=problem, technique=technique, task=task, hardware=hardware, minutes=minutes)
    p.write_text(json.dumps(d, **style) + "\n", encoding="utf-8")
