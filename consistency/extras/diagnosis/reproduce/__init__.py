"""Turn a finding into a folder that shows it with torch and safetensors alone.

`evidence.py` finds the evidence of a finding, `cut.py` cuts it to size, `folder.py` writes the folder and runs it.
`scripts/` holds the scripts that it copies there, each a file of its own that runs alone.
"""
