"""Untrusted programs: run under bubblewrap on this machine, or on a SandboxFusion server.

protocol.py has the callers' interface, docs/guide/sandbox.md lists the guarantees. It does not know
the purpose of the programs: ../code.py compares their results, and believes nothing else.

    python -c "from tandem.plugins.graders.sandbox.local import *; print(Bubblewrap().state())"
"""
