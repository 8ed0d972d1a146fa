"""What a lighthouse knows and decides: who trains together (torchft).

`quorum` decides for perdure's own lighthouse (its process is `service/lighthouse`); `watch`
finds the same where the lighthouse is torchft's. What becomes of a group that was lost is
`control/recovery/groups.py`.
"""
