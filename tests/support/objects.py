"""A store of objects, and a worker's process that takes them, without Ray."""

from tandem.plugins.cluster.rollout_worker import RolloutWorker


class Store:
    """A store that counts the bytes of its objects."""

    def __init__(self):
        self.objects = []

    def put(self, buffer):
        self.objects.append(buffer)
        return len(self.objects) - 1

    def get(self, number):
        return self.objects[number]


class Host(RolloutWorker):
    """A worker's process on a node, as both ends have it."""

    def __init__(self, store, node):
        super().__init__()
        self.store, self.node = store, node

    def give(self, number, stored):
        self.take(number, self.store.get(stored))
