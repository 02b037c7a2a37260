"""Learning from fixed data: `tandem sft`, `tandem dpo` and `tandem rm`.

For anyone who warms up a model on chats before reinforcement learning, prefers answers without
rollouts, or trains a reward model for `reward.model`. docs/guide/algorithms.md has the losses with
their papers, docs/guide/data.md the forms of a row.

    rows.py          a row as a chat, or as a pair of a chosen and a rejected answer
    loss_mask.py     chats as tokens, and which of them carry loss
    inputs.py        what the commands read, checked before a model is loaded
    supervised.py    one optimizer step on chats or on pairs
    pair_losses.py   DPO, IPO and Bradley-Terry, as pure functions
    reward_model.py  reward.model: scores of a reward model in a run of `tandem train`
    jobs.py          the jobs that train_loop.py runs, on one process or several

It plugs in as inputs, jobs, fixed_data and reward_models of tandem/registry.py. The keys are the
core's, in the sections [sft] and [preference].
"""
