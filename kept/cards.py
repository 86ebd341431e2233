"""Write the bundled readers' folders and cards from what training left."""
import shutil,sys,json
from pathlib import Path
from t5accel import quality
from t5accel.study.bert import load_bert, threshold_of, widths
from t5accel.study.spans import answerer, torch_run
ROOT=Path('study/data'); which=sys.argv[1:]
rows={}
for name,src in (('mini-bert','reader-a/model'),('mini-bert-pruned','reader-p/model')):
    if not Path(src,'model.safetensors').exists(): continue
    (ROOT/name).mkdir(exist_ok=True)
    for f in ('config.json','model.safetensors','tokenizer.json','tokenizer_config.json','special_tokens_map.json'):
        if Path(src,f).exists(): shutil.copy(Path(src,f),ROOT/name/f)
    m,t=load_bert(ROOT/name)
    q=quality.evaluate(answerer(t,torch_run(m),threshold=threshold_of(m)),names=['questions']).questions
    rows[name]=(q,m,(ROOT/name/'model.safetensors').stat().st_size)
    print(name,q,widths(m),threshold_of(m),m.num_parameters(),rows[name][2])
def line(title,get): return '| '+title+' | '+' | '.join(f'{get(rows[n][0]):.1f}' for n in rows)+' |'
def table():
    head='| | '+' | '.join(rows)+' |\n|---|'+'---|'*len(rows)
    return '\n'.join([head,
     line('200 questions: F1',lambda q:q.all.f1), line('… exact match',lambda q:q.all.exact_match),
     line('… of seen templates: F1',lambda q:q.seen.f1), line('… of unseen templates: F1',lambda q:q.unseen.f1),
     line('… with an answer: F1',lambda q:q.has_answer.f1), line('… without one: abstains right',lambda q:q.no_answer.exact_match)])
HEAD='''---
language: en
license: apache-2.0
pipeline_tag: question-answering
library_name: transformers
tags: [bert, course{tag}]
---

'''
if 'mini-bert' in rows:
    q,m,size=rows['mini-bert']
    (ROOT/'mini-bert/README.md').write_text(HEAD.format(tag='')+f'''# mini-bert

A small BERT that answers a question on a text by a span of that text, or abstains where the text does not hold the answer
(SQuAD 2.0's rule: `[CLS]` against the best span). {m.num_parameters()/1e6:.1f} million weights: {m.config.num_hidden_layers} layers, {m.config.hidden_size} wide, {m.config.num_attention_heads} heads, {m.config.vocab_size} WordPieces;
fp16 safetensors of {size/1e6:.1f} MB. The course uses it to measure what pruning, graphs, fusions and integers do to an encoder.

```python
from t5accel.study.bert import load_bert, threshold_of
from t5accel.study.spans import answerer, torch_run

model, tokenizer = load_bert("mini-bert")
answer = answerer(tokenizer, torch_run(model), threshold=threshold_of(model))
print(answer(["question: Where did Ivan buy the kettle? context: Carla bought a lamp. Ivan bought a kettle in Norbury."]))
```

transformers alone loads it, too: `AutoModelForQuestionAnswering.from_pretrained("data/mini-bert")`. The threshold,
`null_score_diff_threshold` in its configuration, was chosen on stories drawn for that alone.

## Quality

fp32, on the course's evaluation set. *Seen* means unseen stories of templates that training drew from.

{table()}

## Made with

```bash
python scripts/reader.py --out build/reader
```

Minutes on two cores, with nothing but the generated stories (`t5accel/mini/reader.py` says in which order).

## Limits

Short made-up stories in plain English, without capitals; no other texts, and hardly any wording that its templates do not
have. It was trained on texts of up to about 200 tokens.

## Licence

Apache-2.0. No text of others was used.
''')
if 'mini-bert-pruned' in rows:
    q,m,size=rows['mini-bert-pruned']; w=widths(m)
    (ROOT/'mini-bert-pruned/README.md').write_text(HEAD.format(tag=', pruned')+f'''# mini-bert-pruned

[mini-bert](../mini-bert/README.md) without 40% of its attention heads and 60% of its feed-forward neurons, which movement chose while it was
trained on. They are really gone: layers have {", ".join(map(str,w["heads"]))} heads and {", ".join(map(str,w["neurons"]))} neurons; fp16 safetensors of {size/1e6:.1f} MB.

Because its layers differ in size, transformers alone does not load it: `load_bert("mini-bert-pruned")` of
`t5accel/study/bert.py` does.

## Quality

fp32, on the course's evaluation set. *Seen* means unseen stories of templates that training drew from.

{table()}

## Made with

```bash
python scripts/reader.py --out build/reader-pruned --prune
```

## Limits and licence

Those of [the whole one](../mini-bert/README.md).
''')
