"""placeholder"""
def choose(layer, unsafe, python):
    return "A" if layer == "auto" else layer
