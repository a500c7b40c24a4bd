"""Classes of trust: equal to torch's where torch has an opinion, and deaf to known bypasses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.formats.globals import Trust, classify, is_dangerous
from ckpttool.model.checkpoint import open_checkpoint

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"

ASK = """
import json, sys, torch
from torch._weights_only_unpickler import _get_allowed_globals, _read_global_instruction
from torch._weights_only_unpickler import IMPORT_MAPPING, NAME_MAPPING
old = [[m, n] for m, n in NAME_MAPPING] + [[m, "set"] for m in IMPORT_MAPPING]
allowed = sorted(_get_allowed_globals())
print(json.dumps([allowed, old]))
"""


def of(path: str) -> Trust:
    """The class of a dotted path, split where the pickle of a plain function would split it."""
    module, _, name = path.rpartition(".")
    return classify(module, name)


def test_torch_safe_is_what_torch_allows() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK], capture_output=True, text=True, check=True
    )
    allowed, old = json.loads(done.stdout)
    assert len(allowed) > 100
    refused = [path for path in allowed if of(path) is not Trust.TORCH_SAFE]
    assert refused == []
    # And no more than that. Every name that torch knows at all is tried.
    tried = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NAMES], capture_output=True, text=True, check=True
    )
    names = json.loads(tried.stdout)
    assert len(names) > 5000
    more = [
        f"{module}.{name}"
        for module, name in [*names, *old]
        if classify(module, name) is Trust.TORCH_SAFE and f"{module}.{name}" not in allowed
    ]
    # The names of Python 2, which torch maps to these before it looks.
    assert set(more) <= {f"__builtin__.{name}" for name in ("set", "bytearray", "complex")}


# Every attribute of torch's modules, of builtins, collections and numpy: (module, name).
NAMES = """
import builtins, collections, json, sys, types, numpy, torch, torch.nn.modules
modules = [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] in ("torch", "numpy", "collections")]
pairs = {(m.__name__, name) for m in modules + [builtins] if isinstance(m, types.ModuleType) for name in dir(m)}
print(json.dumps(sorted(pairs)))
"""

# Routes to running code that scanners of pickles were publicly shown to let through, and the plain ones.
DANGEROUS = [
    "os.system",
    "posix.system",
    "nt.system",
    "os.popen",
    "os.execv",
    "os.spawnl",
    "os.remove",
    "os.fdopen",
    "os.putenv",
    "subprocess.Popen",
    "subprocess.call",
    "subprocess.check_output",
    "subprocess.getoutput",
    "_posixsubprocess.fork_exec",
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "builtins.open",
    "builtins.__import__",
    "builtins.getattr",
    "builtins.setattr",
    "builtins.delattr",
    "builtins.globals",
    "builtins.vars",
    "builtins.input",
    "builtins.breakpoint",
    "builtins.map",
    "builtins.filter",
    "__builtin__.eval",
    "__builtin__.execfile",
    "__builtin__.file",
    "__builtin__.apply",
    "__builtin__.getattr",
    "builtins.classmethod",
    "builtins.super",
    "builtins.memoryview.__class__",
    "builtins.str.format",
    "builtins.object.__subclasses__",
    "sys.modules",
    "sys.settrace",
    "importlib.import_module",
    "importlib.reload",
    "importlib.util.spec_from_file_location",
    "imp.load_source",
    "runpy.run_path",
    "runpy._run_code",
    "runpy.run_module",
    "pkgutil.resolve_name",
    "pkgutil.get_data",
    "pydoc.pipepager",
    "pydoc.locate",
    "pydoc.tempfilepager",
    "code.InteractiveInterpreter",
    "code.interact",
    "codeop.compile_command",
    "pdb.run",
    "pdb.Pdb",
    "bdb.Bdb",
    "bdb.Bdb.run",
    "trace.Trace",
    "timeit.timeit",
    "timeit.main",
    "profile.run",
    "profile.Profile.run",
    "cProfile.run",
    "cProfile.runctx",
    "doctest.debug_script",
    "doctest.testfile",
    "ctypes.CDLL",
    "ctypes.cdll",
    "ctypes.PyDLL",
    "multiprocessing.util.spawnv_passfds",
    "threading.Thread",
    "asyncio.unix_events._UnixSubprocessTransport._start",
    "asyncio.run",
    "socket.create_connection",
    "http.client.HTTPSConnection",
    "http.server.test",
    "urllib.request.urlopen",
    "urllib.request.urlretrieve",
    "ftplib.FTP",
    "smtplib.SMTP",
    "telnetlib.Telnet",
    "webbrowser.open",
    "pty.spawn",
    "pip.main",
    "pip._internal.main",
    "ensurepip._run_pip",
    "venv.create",
    "distutils.spawn.spawn",
    "distutils.file_util.write_file",
    "setuptools.sandbox.run_setup",
    "site.addsitedir",
    "shutil.rmtree",
    "shutil.move",
    "tempfile.mktemp",
    "linecache.getline",
    "fileinput.input",
    "signal.signal",
    "signal.set_wakeup_fd",
    "inspect.getattr_static",
    "marshal.loads",
    "pickle.loads",
    "pickle.Unpickler",
    "_pickle.loads",
    "cPickle.loads",
    "dill.loads",
    "cloudpickle.loads",
    "joblib.load",
    "shelve.open",
    "dbm.open",
    "sqlite3.connect",
    "types.FunctionType",
    "types.CodeType",
    "types.ModuleType",
    "ast.literal_eval",
    "compileall.compile_dir",
    "py_compile.compile",
    "atexit.register",
    "faulthandler.enable",
    "idlelib.pyshell.ModifiedInterpreter.runcommand",
    "idlelib.autocomplete.AutoComplete",
    "idlelib.run.Executive",
    "lib2to3.pgen2.grammar.Grammar.loads",
    "lib2to3.pgen2.pgen.ParserGenerator.make_label",
    "cgitb.lookup",
    "cgi.test",
    "logging.config.listen",
    "logging.config._resolve",
    "logging.FileHandler",
    "io.open",
    "_io.FileIO",
    "io.FileIO",
    "codecs.open",
    "tarfile.open",
    "zipfile.ZipFile",
    "mmap.mmap",
    "operator.attrgetter",
    "operator.methodcaller",
    "_operator.attrgetter",
    "operator.call",
    "operator.itemgetter.__class__",
    "functools.partial",
    "functools.reduce",
    "functools.partialmethod",
    "itertools.starmap",
    "test.support.script_helper.assert_python_ok",
    "_pyrepl.pager.pipe_pager",
    "_aix_support._read_cmd_output",
    "_osx_support._read_output",
    "_osx_support._find_build_tool",
    "platform.popen",
    "uu.decode",
    "netrc.netrc",
    "rlcompleter.Completer",
    "getpass.getpass",
    "xml.etree.ElementTree.parse",
    "sched.scheduler",
    "readline.read_history_file",
    "torch.hub.load",
    "torch.hub._load_local",
    "torch.load",
    "torch.compile",
    "torch.jit.load",
    "torch.jit.unsupported_tensor_ops.execWrapper",
    "torch.jit._script.script",
    "torch.utils.cpp_extension.load_inline",
    "torch.package.PackageImporter",
    "torch.serialization.load",
    "torch.utils.bottleneck.__main__.run_cprofile",
    "torch.utils.bottleneck.__main__.run_autograd_prof",
    "torch.utils.data.datapipes.utils.decoder.basichandlers",
    "torch.utils._config_module.ConfigModule.load_config",
    "torch.utils._config_module.load_config",
    "torch.utils.collect_env.run",
    "torch.utils.collect_env.run_and_read_all",
    "torch.utils.model_zoo.load_url",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
    "torch._dynamo.guards.GuardBuilder.get",
    "torch._inductor.codecache.compile_file",
    "torch._inductor.codecache.PyCodeCache",
    "torch.fx.graph_module._forward_from_src",
    "torch.ops.load_library",
    "torch._ops._OpNamespace",
    "torch.classes.load_library",
    "torch.distributed.rpc.rpc_sync",
    "torch.multiprocessing.reductions.rebuild_tensor",
    "torch.multiprocessing.spawn",
    "torch.testing._internal.common_utils.run_tests",
    "torch.library.Library",
    "numpy.testing._private.utils.runstring",
    "numpy.testing.rundocs",
    "numpy.load",
    "numpy.fromfile",
    "numpy.memmap",
    "numpy.loadtxt",
    "numpy.f2py.crackfortran.getlincoef",
    "numpy.f2py.crackfortran._eval_length",
    "numpy.f2py.crackfortran.myeval",
    "numpy.f2py.compile",
    "numpy.distutils.exec_command.exec_command",
    "numpy.lib.npyio.load",
    "numpy.lib._npyio_impl.NpzFile",
    "numpy.ctypeslib.load_library",
    "numpy.core._internal._ctypes",
    "pandas.read_pickle",
    "pandas.io.pickle.read_pickle",
    "pandas.core.computation.eval.eval",
    "pandas.eval",
    "scipy.io.loadmat",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "collections.namedtuple",
    "copyreg.__newobj__",
    "copyreg.add_extension",
    "copyreg.pickle",
    "enum._make_class_unpicklable",
    "typing.get_type_hints",
    "typing.ForwardRef",
    "dataclasses.make_dataclass",
    "string.Formatter",
    "IPython.embed",
]


@pytest.mark.parametrize("path", DANGEROUS)
def test_bypasses_of_scanners_are_dangerous(path: str) -> None:
    """Wherever the pickle splits the path: `module` and `name` are only told apart by its author."""
    parts = path.split(".")
    for place in range(1, len(parts)):
        module, name = ".".join(parts[:place]), ".".join(parts[place:])
        assert classify(module, name) is Trust.DANGEROUS, (module, name)
        assert is_dangerous(module, name)


# What a module has imported is an attribute of it, and so within reach of a dotted name.
THROUGH_OTHERS = [
    ("anything", "os.system"),
    ("anything", "subprocess.Popen"),
    ("anything", "codecs.open"),
    ("my_models", "__getattribute__"),
    ("my_models", "__builtins__"),
    ("my_models", "__import__"),
    ("my_models", "Net.__reduce__"),
    ("my_models", "Net.forward.__globals__"),
    ("my_models", "sys"),
    ("my_models", "_os"),
    ("my_models", "importlib"),
    ("collections.abc", "sys"),
    ("collections", "abc.sys.modules"),
    ("torch.nn.modules.module", "os"),
    ("torch.nn.modules.linear", "torch.hub.load"),
    ("torch", "nn.modules.linear.torch.hub.load"),
    ("torch.nn.modules.linear", "math.sin.__self__"),
    ("argparse", "_os"),
    ("argparse", "_sys.modules"),
    ("datetime", "sys"),
    ("torch.serialization", "os.system"),
    ("torch", "serialization.os.system"),
    ("a", ".".join("b" * 60)),
]


@pytest.mark.parametrize(("module", "name"), THROUGH_OTHERS)
def test_a_way_through_another_module_is_dangerous(module: str, name: str) -> None:
    assert classify(module, name) is Trust.DANGEROUS


def honest() -> dict[str, str]:
    """Globals outside torch's allow-list that the corpus page lists, by the page's own reading."""
    found: dict[str, str] = {}
    for line in (CORPUS / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0].startswith("torch-"):
            names = re.sub(r"\[.*\]|\(.*\)|– .*", "", cells[6])
            for path in filter(None, (name.strip(" –") for name in names.split(","))):
                found[path] = cells[0]
    return found


def test_honest_checkpoints_name_nothing_dangerous() -> None:
    names = honest()
    assert len(names) > 60
    assert "pathlib.PosixPath" in names
    dangerous = {path: file for path, file in names.items() if of(path) is Trust.DANGEROUS}
    assert dangerous == {}


@pytest.mark.parametrize(
    ("path", "trust"),
    [
        ("collections.OrderedDict", Trust.TORCH_SAFE),
        ("torch._utils._rebuild_tensor_v2", Trust.TORCH_SAFE),
        ("torch.float8_e8m0fnu", Trust.TORCH_SAFE),
        ("torch.FloatStorage", Trust.TORCH_SAFE),
        ("__builtin__.set", Trust.TORCH_SAFE),
        ("argparse.Namespace", Trust.BENIGN),
        ("omegaconf.listconfig.ListConfig", Trust.BENIGN),
        ("numpy._core.multiarray._reconstruct", Trust.BENIGN),
        ("numpy.core.multiarray.scalar", Trust.BENIGN),
        ("numpy.dtypes.UInt32DType", Trust.BENIGN),
        ("torch.nn.modules.linear.Linear", Trust.BENIGN),
        ("collections.defaultdict", Trust.BENIGN),
        ("builtins.frozenset", Trust.BENIGN),
        ("operator.itemgetter", Trust.BENIGN),
        ("models.Net", Trust.UNKNOWN),
        ("__main__.Net", Trust.UNKNOWN),
        ("torch.no_such_thing", Trust.UNKNOWN),
        ("", Trust.UNKNOWN),
    ],
)
def test_some_of_each_class(path: str, trust: Trust) -> None:
    assert of(path) is trust


def test_functions_beside_layers_are_no_layers() -> None:
    """torch.nn.modules is benign for its classes alone."""
    assert classify("torch.nn.modules.module", "register_module_forward_hook") is not Trust.BENIGN
    assert classify("torch.nn.modules.utils", "_single") is not Trust.BENIGN


def test_functions_beside_the_classes_of_sharded_metadata_are_not_known() -> None:
    """Torch's `.metadata` names these classes alone; what is beside them opens and writes files."""
    for module in ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint"):
        assert classify(f"{module}.metadata", "MetadataIndex") is Trust.BENIGN
        assert classify(f"{module}.filesystem", "_StorageInfo") is Trust.BENIGN
        assert classify(f"{module}.metadata", "field") is Trust.UNKNOWN
        for name in ("FileSystemReader", "_write_files_from_queue", "FileSystemReader.load_bytes"):
            assert classify(f"{module}.filesystem", name) is Trust.UNKNOWN


def test_a_dotted_name_is_never_safe() -> None:
    assert classify("torch", "_utils._rebuild_tensor_v2") is not Trust.TORCH_SAFE
    assert classify("collections", "OrderedDict.fromkeys") is Trust.UNKNOWN
    assert classify("torch.serialization", "os.system") is Trust.DANGEROUS
    assert classify("collections", "OrderedDict.__init__") is Trust.DANGEROUS


def test_ranks_go_from_best_to_worst() -> None:
    ranks = [trust.rank for trust in Trust]
    assert ranks == [0, 1, 2, 3]
    assert [trust.value for trust in Trust] == ["torch-safe", "benign", "unknown", "dangerous"]


def test_every_file_of_the_corpus_is_free_of_danger() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    for path in files:
        with open_checkpoint(path) as checkpoint:
            dangerous = [use for use in checkpoint.globals if use.trust is Trust.DANGEROUS]
            assert dangerous == [], path
            assert checkpoint.trust is not Trust.DANGEROUS, path
