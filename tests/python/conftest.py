from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # machines are slow at times; no test is about time
settings.load_profile("untimed")
