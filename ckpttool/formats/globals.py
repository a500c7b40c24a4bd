"""What the globals of a pickle mean for whoever loads it: four classes of trust.

*torch-safe*: `torch.load(weights_only=True)` takes it. *benign*: known and harmless, but needs an
allow-list or `weights_only=False`. *unknown*: nothing is known; loading imports a module by that
name and calls into it. *dangerous*: a route to running code, reading or writing files, or reaching
arbitrary attributes.

Sources: torch/_weights_only_unpickler.py (`_get_allowed_globals`) of torch 2.6 to 2.13; the
standard library's index of modules; the published bypasses of pickle scanners. The lists name kinds
(a whole module, a whole package), so that the next function of a dangerous module is covered too.
"""

from __future__ import annotations

from enum import Enum

from ckpttool.formats.dtypes import BITS, STORAGE_DTYPES, TENSOR_CLASS_DTYPES


class Trust(str, Enum):
    """The classes, from the best to the worst."""

    TORCH_SAFE = "torch-safe"
    BENIGN = "benign"
    UNKNOWN = "unknown"
    DANGEROUS = "dangerous"

    @property
    def rank(self) -> int:
        """0 for torch-safe up to 3 for dangerous: to sort and to compare by."""
        return _RANKS[self.value]


_RANKS = {"torch-safe": 0, "benign": 1, "unknown": 2, "dangerous": 3}


def classify(module: str, name: str) -> Trust:
    """The trust class of the global `module.name`. Whatever is not known is `UNKNOWN`."""
    if (module, name) in _TORCH_SAFE or name in _TORCH_SAFE_NAMES.get(module, ()):
        return Trust.TORCH_SAFE
    if is_dangerous(module, name):
        return Trust.DANGEROUS
    if _is_benign(module, name):
        return Trust.BENIGN
    return Trust.UNKNOWN


def is_dangerous(module: str, name: str) -> bool:
    """Whether calling or building this global can run code that the file chooses.

    A dotted name reaches through attributes (PEP 3154's STACK_GLOBAL), so every part of the path
    counts: `torch.serialization` with the name `os.system` is `os.system`.
    """
    parts = [module, *name.split(".")]
    if len(parts) == 2:
        return _leads_to_code(module, name)
    if len(parts) > _MOST_PARTS or any(p in _REACHES_OUT or _is_dunder(p) for p in parts[1:]):
        return True
    # `torch` with the name `hub.load` is `torch.hub` with the name `load`, and what a module has
    # imported is its attribute: `json` with the name `codecs.open` is `codecs.open`.
    return any(
        _leads_to_code(".".join(parts[start:stop]), parts[stop])
        for start in range(len(parts) - 1)
        for stop in range(start + 1, len(parts))
    )


def _leads_to_code(module: str, name: str) -> bool:
    """The same for a name without dots."""
    top = module.partition(".")[0]
    if top in ("builtins", "__builtin__"):
        return module != top or name not in _HARMLESS_BUILTINS
    if top in _DANGEROUS_PACKAGES or _is_below(module, _DANGEROUS_MODULES):
        return (module, name) not in _HARMLESS_EXCEPTIONS
    if name in _DANGEROUS_NAMES.get(module, ()):
        return True
    # A module's own imports and hooks are attributes of it: `anything.os`,
    # `anything.__getattribute__`.
    return name in _REACHES_OUT or (_is_dunder(name) and (module, name) not in _HARMLESS_EXCEPTIONS)


def _is_below(module: str, trees: frozenset[str]) -> bool:
    """Whether `module` is one of `trees`, or lies in one of them."""
    while module:
        if module in trees:
            return True
        module = module.rpartition(".")[0]
    return False


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_benign(module: str, name: str) -> bool:
    if module in ("builtins", "__builtin__"):
        return True  # what is dangerous among them has been sorted out before
    if "." in name:
        return False
    if module.startswith("torch.nn.modules."):
        return name[:1].isupper()  # its layers, not the functions beside them
    if name in _BENIGN_NAMES.get(module, ()) or module in _BENIGN_MODULES:
        return True
    return module == "torch" and name in _TORCH_PLAIN


_MOST_PARTS = 50  # of a dotted name: no honest one has as many
_LEGACY_SPARSE = frozenset(
    f"{kind}Tensor"
    for kind in ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)
_TENSOR_CLASSES = frozenset(
    name for name in TENSOR_CLASS_DTYPES if not name.startswith(("Q", "Complex"))
)
_STORAGE_CLASSES = frozenset(STORAGE_DTYPES) - {"UntypedStorage"}
_QSCHEMES = frozenset(
    (
        *("per_channel_affine", "per_channel_affine_float_qparams", "per_channel_symmetric"),
        *("per_tensor_affine", "per_tensor_symmetric"),
    )
)

# The real dtypes of torch by name; its aliases (`torch.float`) are never pickled.
_TORCH_SAFE_NAMES: dict[str, frozenset[str]] = {
    "torch": frozenset(BITS)
    | _STORAGE_CLASSES
    | _TENSOR_CLASSES
    | _QSCHEMES
    | {"Size", "Tensor", "device"},
    "torch.cuda": frozenset(n for n in _STORAGE_CLASSES if not n.startswith("Q")) | _TENSOR_CLASSES,
    "torch.sparse": _LEGACY_SPARSE,
    "torch.cuda.sparse": _LEGACY_SPARSE,
    "torch.storage": frozenset(("TypedStorage", "UntypedStorage")),
    "torch._utils": frozenset(
        (
            "_rebuild_device_tensor_from_cpu_tensor",
            "_rebuild_device_tensor_from_numpy",
            "_rebuild_meta_tensor_no_storage",
            "_rebuild_nested_tensor",
            "_rebuild_parameter",
            "_rebuild_parameter_with_state",
            "_rebuild_qtensor",
            "_rebuild_sparse_tensor",
            "_rebuild_tensor",
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
            "_rebuild_wrapper_subclass",
        )
    ),
}

_TORCH_SAFE = frozenset(
    (
        ("_codecs", "encode"),
        ("builtins", "bytearray"),
        ("builtins", "complex"),
        ("builtins", "set"),
        # The unpickler maps the Python 2 names of protocol 2 to these before it looks.
        ("__builtin__", "bytearray"),
        ("__builtin__", "complex"),
        ("__builtin__", "set"),
        ("collections", "Counter"),
        ("collections", "OrderedDict"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.serialization", "_get_layout"),
    )
)

# Builtins that neither run code nor reach for attributes; all others are dangerous.
_HARMLESS_BUILTINS = frozenset(
    (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list"),
        *("object", "range", "xrange", "set", "slice", "str", "tuple", "type", "unicode", "long"),
        *("reversed", "enumerate", "zip", "abs", "min", "max", "sum", "round", "len"),
        *("Ellipsis", "NotImplemented", "NoneType", "ellipsis", "property", "basestring"),
        *("ArithmeticError", "AssertionError", "AttributeError", "BaseException"),
        *("EOFError", "Exception", "FileNotFoundError", "FloatingPointError", "IOError"),
        *("ImportError", "IndexError", "KeyError", "KeyboardInterrupt", "LookupError"),
        *("MemoryError", "NameError", "NotImplementedError", "OSError", "OverflowError"),
        *("PermissionError", "RuntimeError", "RuntimeWarning", "StopIteration", "SystemExit"),
        *("TimeoutError", "TypeError", "UnicodeDecodeError", "UnicodeError", "UserWarning"),
        *("ValueError", "Warning", "ZeroDivisionError", "ConnectionError", "ConnectionResetError"),
    )
)

# Packages of which everything counts: they run programs, load code, open files or sockets.
_DANGEROUS_PACKAGES = frozenset(
    (
        *("os", "nt", "posix", "sys", "subprocess", "_posixsubprocess", "commands", "popen2"),
        *("importlib", "imp", "_imp", "runpy", "pkgutil", "zipimport", "pydoc", "code", "codeop"),
        *("pdb", "bdb", "trace", "timeit", "profile", "cProfile", "pstats", "doctest", "unittest"),
        *("ctypes", "_ctypes", "cffi", "multiprocessing", "concurrent", "threading", "_thread"),
        *("asyncio", "socket", "_socket", "socketserver", "ssl", "http", "urllib", "urllib2"),
        *("httplib", "ftplib", "smtplib", "poplib", "imaplib", "telnetlib", "xmlrpc", "requests"),
        *("aiohttp", "webbrowser", "pty", "tty", "pip", "ensurepip", "venv", "setuptools"),
        *("distutils", "pkg_resources", "site", "sitecustomize", "usercustomize", "shutil"),
        *(
            "tempfile",
            "fileinput",
            "linecache",
            "glob",
            "signal",
            "gc",
            "inspect",
            "dis",
            "marshal",
        ),
        *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "dbm"),
        *("sqlite3", "types", "ast", "compileall", "py_compile", "atexit", "faulthandler"),
        *(
            "idlelib",
            "lib2to3",
            "tkinter",
            "turtle",
            "cgi",
            "cgitb",
            "wsgiref",
            "builtin",
            "logging",
        ),
        *("io", "_io", "codecs", "tarfile", "zipfile", "mmap", "resource", "sched", "readline"),
        *("test", "IPython", "jupyter_client", "nbconvert", "ipykernel", "xdist", "pytest"),
        *("_pytest", "fabric", "paramiko", "invoke", "sh", "plumbum", "pexpect", "psutil"),
        *("jinja2", "mako", "execnet", "rpyc", "Pyro4", "numexpr", "llvmlite", "cython", "Cython"),
        *("_osx_support", "_aix_support", "_pyrepl", "_bootlocale", "_winapi", "winreg", "msvcrt"),
        *("platform", "uu", "netrc", "smtpd", "crypt", "sre_compile", "pyclbr", "modulefinder"),
        *("rlcompleter", "cmd", "getpass", "nturl2path", "xml", "pyexpat", "pwd", "grp", "spwd"),
        *("operator", "_operator", "functools", "_functools", "itertools", "weakref", "contextlib"),
    )
)

# Modules in otherwise plain packages; each with all that lies below it.
_DANGEROUS_MODULES = frozenset(
    (
        *("torch.hub", "torch.jit", "torch.utils.cpp_extension", "torch.utils.data.datapipes"),
        *("torch.package", "torch.utils._config_module", "torch.utils.bottleneck"),
        *("torch.utils.collect_env", "torch.fx", "torch.multiprocessing"),
        *("torch._inductor", "torch._dynamo.guards"),
        *("torch.ops", "torch._ops", "torch.classes", "torch._classes", "torch.library"),
        *("torch.distributed.rpc", "torch.distributed.run", "torch.distributed.launch"),
        *("torch.utils.model_dump", "torch.utils.model_zoo", "torch.serialization"),
        *("torch.utils.show_pickle", "torch._weights_only_unpickler", "torch.utils._import_utils"),
        *(
            "numpy.testing",
            "numpy.f2py",
            "numpy.distutils",
            "numpy.lib.npyio",
            "numpy.lib._npyio_impl",
        ),
        *("numpy.lib.utils", "numpy.lib._datasource", "numpy.ctypeslib", "numpy.core._internal"),
        *("pandas.eval", "pandas.io.pickle", "pandas.core.computation.eval", "pandas.io.parquet"),
        *("scipy.io", "transformers.dynamic_module_utils", "transformers.utils.hub"),
    )
)

_HARMLESS_EXCEPTIONS = frozenset(
    (
        ("operator", "itemgetter"),
        ("_operator", "itemgetter"),
        ("types", "SimpleNamespace"),
        ("numpy.random._pickle", "__bit_generator_ctor"),
        ("numpy.random._pickle", "__generator_ctor"),
        ("numpy.random._pickle", "__randomstate_ctor"),
        ("torch.serialization", "_get_layout"),
        ("logging", "Logger"),
        ("logging", "getLogger"),
        ("io", "BytesIO"),
        ("_io", "BytesIO"),
        ("itertools", "count"),
        ("joblib.numpy_pickle", "NumpyArrayWrapper"),
        # What TorchScript's own pickles call to build typed lists.
        *(
            ("torch.jit._pickle", name)
            for name in (
                *("build_intlist", "build_tensorlist", "build_doublelist", "build_boollist"),
                *("build_tensor_from_id", "restore_type_tag"),
            )
        ),
    )
)

_DANGEROUS_NAMES: dict[str, frozenset[str]] = {
    "torch": frozenset(("load", "compile", "hub", "jit", "ops", "classes", "package", "save")),
    "numpy": frozenset(("load", "loadtxt", "genfromtxt", "fromfile", "memmap", "save", "savez")),
    "pandas": frozenset(("eval", "read_pickle", "read_csv", "read_parquet", "read_json")),
    "collections": frozenset(("namedtuple",)),
    "copyreg": frozenset(("__newobj__", "__newobj_ex__", "add_extension", "pickle")),
    "copy_reg": frozenset(("__newobj__", "add_extension", "pickle")),
    "enum": frozenset(("_make_class_unpicklable",)),
    "typing": frozenset(("get_type_hints", "ForwardRef", "_eval_type")),
    "dataclasses": frozenset(("make_dataclass", "_create_fn")),
    "string": frozenset(("Formatter",)),
    "torch.testing._internal.common_utils": frozenset(("run_tests", "shell")),
}

# As one part of a dotted name these lead out of the module that they are named under.
_REACHES_OUT = frozenset(
    (
        *("os", "sys", "subprocess", "builtins", "importlib", "eval", "exec", "compile", "system"),
        *("popen", "getattr", "setattr", "open", "shutil", "socket", "ctypes", "runpy", "pickle"),
        *("_os", "_sys", "import_module", "func_globals", "gi_frame", "f_globals"),
    )
)

_BENIGN_MODULES = frozenset(
    (
        *("datetime", "decimal", "fractions", "uuid", "argparse", "ipaddress", "zoneinfo"),
        *("omegaconf", "omegaconf.dictconfig", "omegaconf.listconfig", "omegaconf.base"),
        *("omegaconf.nodes", "easydict", "addict.addict", "torch.torch_version", "yacs.config"),
        *("numpy.dtypes", "numpy.ma", "numpy.ma.core", "numpy.rec", "numpy.random._pickle"),
        *("numpy.random._mt19937", "numpy.random._pcg64", "numpy.random._philox"),
        *("numpy.random._sfc64", "numpy.random.bit_generator", "numpy.random.mtrand"),
        *(
            "torch.nn.modules.activation",
            "torch.nn.modules.batchnorm",
            "torch.nn.modules.container",
        ),
        *("torch.nn.modules.conv", "torch.nn.modules.dropout", "torch.nn.modules.flatten"),
        *("torch.nn.modules.linear", "torch.nn.modules.loss", "torch.nn.modules.normalization"),
        *("torch.nn.modules.padding", "torch.nn.modules.pixelshuffle", "torch.nn.modules.pooling"),
        *("torch.nn.modules.rnn", "torch.nn.modules.sparse", "torch.nn.modules.transformer"),
        *("torch.nn.modules.upsampling", "torch.nn.modules.distance", "torch.nn.modules.fold"),
        *(
            "torch.nn.modules.instancenorm",
            "torch.nn.modules.module",
            "torch.nn.modules.channelshuffle",
        ),
        *("torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd", "torch.optim.lr_scheduler"),
        *(
            "transformers.training_args",
            "transformers.trainer_utils",
            "transformers.trainer_pt_utils",
        ),
        *("accelerate.state", "accelerate.utils.dataclasses"),
    )
)

_PATHS = frozenset(
    f"{pure}{kind}Path" for pure in ("", "Pure") for kind in ("", "Posix", "Windows")
)

# What torch's `.metadata` is made of, under the names of torch 1.12 to 2.13. Not the functions
# beside these classes, which open and write files.
_DCP_METADATA = frozenset(
    (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"),
    )
)
_DCP_STORAGE = frozenset(("_StorageInfo", "_StoragePrefix"))

_BENIGN_NAMES: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": _DCP_METADATA,
    "torch.distributed.checkpoint.filesystem": _DCP_STORAGE,
    "torch.distributed._shard.checkpoint.metadata": _DCP_METADATA,
    "torch.distributed._shard.checkpoint.filesystem": _DCP_STORAGE,
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        ("TensorProperties", "MEM_FORMAT_ENCODING")
    ),
    "collections": frozenset(("defaultdict", "deque", "ChainMap", "UserDict", "UserList")),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "posixpath": frozenset(("join",)),
    "copyreg": frozenset(("_reconstructor",)),
    "copy_reg": frozenset(("_reconstructor",)),
    "types": frozenset(("SimpleNamespace",)),
    "operator": frozenset(("itemgetter",)),
    "_operator": frozenset(("itemgetter",)),
    "logging": frozenset(("Logger", "getLogger")),
    "enum": frozenset(("Enum", "IntEnum", "_make_class_unpicklable")),
    "numpy": frozenset(("ndarray", "dtype", "generic", "recarray", "record"))
    | {"bool_", "str_", "bytes_", "float16", "float32", "float64", "int8", "int16"}
    | {"int32", "int64", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128"},
    "numpy.core.multiarray": frozenset(("_reconstruct", "scalar")),
    "numpy._core.multiarray": frozenset(("_reconstruct", "scalar")),
    "numpy.core.numeric": frozenset(("_frombuffer",)),
    "numpy._core.numeric": frozenset(("_frombuffer",)),
    "torch.storage": frozenset(("_load_from_bytes",)),
    "torch._utils": frozenset(("_rebuild_xla_tensor",)),
    "torch._tensor": frozenset(("_rebuild_from_type",)),
    "torch.tensor": frozenset(("_rebuild_from_type",)),
    "ml_dtypes": frozenset(("bfloat16", "float8_e4m3fn", "float8_e5m2")),
}

# Globals of torch that are values, not functions.
_TORCH_PLAIN = frozenset(
    (
        *("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
        *("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
        "Generator",
    )
)
