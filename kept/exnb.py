import sys, time, nbformat, json
from pathlib import Path
from nbclient import NotebookClient
p=Path('/root/w/nb15-in.ipynb')
nb=nbformat.read(p,as_version=4); meta=json.loads(json.dumps(nb.metadata)); t=time.time()
try:
    NotebookClient(nb,timeout=200,kernel_name='python3',resources={'metadata':{'path':'notebooks'}}).execute()
finally:
    print('seconds',round(time.time()-t,1))
    for c in nb.cells:
        c.metadata.pop('execution',None)
    nb.metadata=nbformat.from_dict(meta)
    Path('/root/w/nb15-out.ipynb').write_text(json.dumps(nb,indent=1,ensure_ascii=False)+"\n")
