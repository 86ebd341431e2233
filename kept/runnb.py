import sys, time, nbformat
from nbclient import NotebookClient
src,dst=sys.argv[1:3]
nb=nbformat.read(src,as_version=4)
t=time.time()
NotebookClient(nb,timeout=300,kernel_name='python3',resources={'metadata':{'path':'/root/w/study/notebooks'}},allow_errors=False).execute()
print('seconds',round(time.time()-t,1))
for c in nb.cells:
    c.metadata.pop('execution',None)
nb.metadata.pop('widgets',None)
nb.metadata['kernelspec']={'display_name':'Python 3','language':'python','name':'python3'}
nbformat.write(nb,dst)
