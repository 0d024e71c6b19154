"""A finding -> a folder that shows it with torch and safetensors alone.

`evidence.py` finds what a finding rests on, `cut.py` cuts it to size, `folder.py` writes the folder and runs it.
`scripts/` holds what is written there, each as a file that one can read.
"""
