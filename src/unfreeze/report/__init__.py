"""Level 2: reports on a run, from the files in runs/<name>/, without torch.

The files are events.jsonl, resolved_config.json, plan.json and receipt.json. The files of rollouts are also
written here (rollouts/writer.py).
"""
