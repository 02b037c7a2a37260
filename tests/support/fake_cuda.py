"""GPUs that are not there: `with FakeCuda() as gpus` gives torch two of them, in one thread.

Their tensors lie in host memory and are computed by the CPU, but say which GPU they are on;
Triton's interpreter runs the kernels. What a GPU would refuse is refused: tensors of two devices in
one operator, numpy of a GPU's tensor, and a kernel launched while another GPU is the current one.
`log` holds what was asked of streams, events, pinned memory and graphs. A replay does nothing.

It does not know time: every copy has arrived when its call returns.
"""

import contextlib
from types import SimpleNamespace

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

MEMORY = 80 << 30
# take tensors of other devices: copies, indices of the host, and what only changes a reference
ACROSS = {"copy_", "to", "cpu", "__getitem__", "__setitem__", "__set__", "set_", "is_set_to"}


class FakeCuda(TorchFunctionMode):
    """The stand-in. count: of GPUs; bfloat16: whether they compute in it."""

    def __init__(self, count=2, bfloat16=True):
        super().__init__()
        self.count, self.bfloat16, self.log = count, bfloat16, []
        self.current = 0
        self._storages = {}  # of the GPUs by address, kept so that no address comes twice
        self._before, self._unknown = [], None

    # ---- the functions of torch.cuda

    def __enter__(self):
        gpus = self

        class Stream:
            """A stream. Everything is done in order, so it waits for nothing."""

            def __init__(self, device=None):
                self.device = gpus.device_of(device)

            def record_event(self):
                gpus.log.append(("record_event", self.device.index))
                return self

            def synchronize(self):
                gpus.log.append(("synchronize", self.device.index))

        class Graph:
            """A captured graph."""

            def replay(self):
                gpus.log.append(("replay", gpus.current))

        @contextlib.contextmanager
        def graph(graph, pool, stream, *, capture_error_mode):
            gpus.log.append(("capture", stream.device.index, capture_error_mode))
            with device(stream.device):
                yield

        @contextlib.contextmanager
        def device(which):
            before, gpus.current = gpus.current, gpus.device_of(which).index
            try:
                yield
            finally:
                gpus.current = before

        def set_device(which):
            gpus.current = gpus.device_of(which).index

        properties = SimpleNamespace(
            name="Fake H100", major=9, minor=0, total_memory=MEMORY, multi_processor_count=3
        )
        for owner, name, value in (
            (torch.version, "cuda", "13.0"),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: self.count),
            (torch.cuda, "current_device", lambda: self.current),
            (torch.cuda, "set_device", set_device),
            (torch.cuda, "device", device),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "current_stream", Stream),
            (torch.cuda, "stream", lambda stream: device(stream.device)),
            (torch.cuda, "empty_cache", lambda: self.log.append(("empty_cache",))),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "mem_get_info", lambda device=None: (MEMORY // 2, MEMORY)),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_device_name", lambda device=None: properties.name),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "is_bf16_supported", lambda emulated=True: self.bfloat16),
            (torch.cuda, "graph_pool_handle", lambda: (0, 1)),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", graph),
            *self._launches(),
        ):
            self._before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        return super().__enter__()

    def __exit__(self, *error):
        while self._before:
            setattr(*self._before.pop())
        return super().__exit__(*error)

    def _launches(self):
        """Triton's launch in the interpreter, which here looks at the current device first."""
        try:
            from triton.runtime.interpreter import GridExecutor
        except ImportError:
            return
        launch = GridExecutor.__call__

        def checked(executor, *arguments, **options):
            on = {t.device for t in arguments if torch.is_tensor(t) and t.is_cuda}
            current = torch.device("cuda", self.current)
            assert on <= {current}, f"{on} launch on {current}"
            self.log.append(("launch", self.current))
            return launch(executor, *arguments, **options)

        yield GridExecutor, "__call__", checked

    def device_of(self, which):
        """The GPU of torch's argument, by default the current one."""
        if which is None or isinstance(which, int):
            return torch.device("cuda", self.current if which is None else which)
        device = torch.device(which)
        return torch.device("cuda", self.current if device.index is None else device.index)

    # ---- tensors

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        inputs = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        if name == "__get__" and func == torch.Tensor.is_cuda.__get__:
            return self._gpu(args[0]) is not None
        if name == "__get__" and func == torch.Tensor.device.__get__:
            gpu = self._gpu(args[0])
            return func(*args) if gpu is None else torch.device("cuda", gpu)
        if name == "backward":  # gradients of our own are computed in here
            with _again(self), self._in_backward():
                return _backward(*args, **kwargs)
        # the latter two are of nn.Module.to
        if func is torch.device or name in ("_parse_to", "_has_compatible_shallow_copy_type"):
            return func(*args, **kwargs)
        if name == "pin_memory":
            self.log.append(("pin", self._gpu(args[0])))
            return args[0].clone()
        gpus = {gpu for t in inputs if (gpu := self._gpu(t)) is not None}
        if name in ("numpy", "__array__") and gpus:
            raise TypeError("can't convert cuda device type tensor to numpy")
        if kwargs.pop("pin_memory", False):
            self.log.append(("pin", None))
        if name not in ACROSS and len({self._gpu(t) for t in inputs if t.dim()}) > 1:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        return self._computed(func, name, args, kwargs, gpus)

    def _computed(self, func, name, args, kwargs, gpus):
        """The result of the CPU, on the device where it would be."""
        asked = [self._asked(value) for value in (*args, *kwargs.values())]
        [target] = {one for one in asked if one is not None} or {None}
        args, kwargs = tree_map(self._on_host, (args, kwargs))
        if name == "mm" and (dtype := kwargs.pop("out_dtype", None)):  # which no CPU has
            args = [t.to(dtype) for t in args]
        result = func(*args, **kwargs)
        if name == "cpu":
            target = "cpu"
        if name in ("cpu", "to") and target is not None:
            before = self._gpu(args[0])
            now = None if target == "cpu" else target
            if before != now and result.data_ptr() == args[0].data_ptr():
                result = result.clone()
            return self._marked(result, now)
        inplace = name.endswith("_") and not name.endswith("__")
        if inplace or target == "cpu" or (target is None and not gpus):
            return result
        return self._marked(result, min(gpus) if target is None else target)

    def _asked(self, value):
        """The device that an argument asks for: a number of a GPU, "cpu", or None."""
        if isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"):
            value = torch.device(value)
        if not isinstance(value, torch.device):
            return None
        return self.device_of(value).index if value.type == "cuda" else value.type

    def _on_host(self, value):
        is_gpu = isinstance(value, torch.device) and value.type == "cuda"
        named = isinstance(value, str) and value.partition(":")[0] == "cuda"
        return torch.device("cpu") if is_gpu or named else value

    def _gpu(self, tensor):
        """The number of the GPU that a tensor is on, or None."""
        if tensor.is_meta or tensor.layout != torch.strided:
            return None
        return self._storages.get(tensor.untyped_storage().data_ptr(), (None, self._unknown))[1]

    @contextlib.contextmanager
    def _in_backward(self):
        """Gradients that torch made by itself are seen by nobody: there they are a GPU's."""
        self._unknown = max((gpu for _, gpu in self._storages.values()), default=None)
        try:
            yield
        finally:
            self._unknown = None

    def _marked(self, result, gpu):
        """The result, its tensors on that GPU."""
        for tensor in tree_leaves(result):
            if gpu is not None and torch.is_tensor(tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = storage, gpu
        return result


def _backward(tensor, gradient=None, **_):
    """Tensor.backward, which no mode takes for itself."""
    above = torch.ones_like(tensor) if gradient is None else gradient
    _engine_run_backward(
        (tensor,), (above,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextlib.contextmanager
def _again(mode):
    """The mode within one of its own calls."""
    TorchFunctionMode.__enter__(mode)
    try:
        yield
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)
