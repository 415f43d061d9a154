from hypothesis import settings

# A first call into torch, or a busy machine, takes longer than hypothesis's 200 ms.
settings.register_profile("labkit", deadline=None)
settings.load_profile("labkit")
