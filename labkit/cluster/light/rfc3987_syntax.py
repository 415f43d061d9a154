"""Stands in front of the real package for Ray's own processes, and says that it is not there.

Every process of Ray imports jsonschema, which imports rfc3987_syntax where that is installed (JupyterLab brings it),
which builds a parser of international addresses: 3 s of CPU, in each of about eight processes, for a check that is
never made. On a small machine Ray then gives up before it is up. jsonschema does without.
"""

raise ImportError("left out on purpose: see labkit/cluster/light")
