KIND = None
