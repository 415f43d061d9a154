"""The tabs below the curves, which look closer: one class each, with `title`, `widget` and `update(views, selected)`.

`update` is called by the painter, and only while the tab is open. It reads the controls and draws what is new, so no
control needs a callback. `views` are the open runs (`OpenRun`), `selected` the one that a tab of a single run shows.
"""

from labkit.ui.tabs.active import ActiveTab
from labkit.ui.tabs.alarms import Alarms
from labkit.ui.tabs.compare import Compare
from labkit.ui.tabs.completions import Completions
from labkit.ui.tabs.export import Export
from labkit.ui.tabs.mismatch import Mismatch
from labkit.ui.tabs.scales import Scales
from labkit.ui.tabs.view import OpenRun

TABS = (Completions, Mismatch, Scales, ActiveTab, Alarms, Compare, Export)

__all__ = ["TABS", "OpenRun"]
