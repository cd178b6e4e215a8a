"""The gate: did a case get slower, said only when the evidence supports it, and with an exit code that CI can act on.

`screening` judges two sides, `verdict` adds the verdicts up, `shift` holds the statistics, `simulation` proves their error rates and
`noise` measures them on a machine. The data comes in as `flashbench.store.side.Side`.
"""
