"""The learning loop: prompts to completions to rewards to gradients.

| module | what it is |
|---|---|
| `trainer.py` | the loop, top to bottom |
| `update.py` | the optimizer steps of a rollout: passes, gradients, clipping, what memory allows |
| `rollout.py` | one step's groups: prompts, completions, rewards, dynamic sampling |
| `advantage.py` | rewards to advantages |
| `batch.py` | groups to packed mini-batches and micro-batches |
| `loss.py` | GRPO, DAPO, Dr. GRPO, GSPO, CISPO; importance correction; KL |
| `optimizer.py` | AdamW, and the learning rate as a function of progress |
| `summary.py` | a step's metrics |
| `log.py` | metrics and completions on disk |
| `trackers.py` | the same metrics in TensorBoard, W&B, trackio, MLflow |
| `checkpoint.py` | what a run needs to go on |
"""
