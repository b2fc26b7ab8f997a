import sys, json
sys.path[:0]=['tests','tests/gpu','src']
import torch
from gpu.bench_linear import measure, ALL
from peregrine.kernels.linear import triton as T, tiles
orig=tiles.large_plan
def narrow(rows, outputs, inputs, gate, add, sms, split=None):
    n=-(-rows//128)*-(-outputs//192)
    return tiles.LargePlan(min(sms,n),1,False,narrow=True)
def wide(rows, outputs, inputs, gate, add, sms, split=None):
    n=-(-rows//128)*-(-outputs//256)
    return tiles.LargePlan(min(sms,2*n),1,False)
def three(rows, outputs, inputs, gate, add, sms, split=None):
    n=-(-rows//192)*-(-outputs//256)
    return tiles.LargePlan(min(sms,2*n),1,False,groups=3)
with torch.inference_mode():
    for name in ('qkv','eagle_qkv'):
        for rows in ((256,320,384,448,512,640,768,1024,1536) if name=='qkv' else (512,)):
            line=[]
            for label,plan in (('narrow',narrow),('wide',wide),('three',three),('now',orig)):
                T.large_plan=plan
                f=measure(name,rows); line.append((label,f['us'],f['ratio']))
            print(name,rows,line,flush=True)
