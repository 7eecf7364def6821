"""What a training step will be like on a TPU slice, from compiling it here."""

from shardtorch.aot._budget import assert_fits as assert_fits
from shardtorch.aot._budget import assert_hbm as assert_hbm
from shardtorch.aot._budget import assert_no_collective as assert_no_collective
from shardtorch.aot._budget import assert_num_compiles as assert_num_compiles
from shardtorch.aot._budget import assert_traffic as assert_traffic
from shardtorch.aot._calibration import efficiency_of as efficiency_of
from shardtorch.aot._compile_report import compile_report as compile_report
from shardtorch.aot._html import to_html as to_html
from shardtorch.aot._report import Buffer as Buffer
from shardtorch.aot._report import Collective as Collective
from shardtorch.aot._report import CompileReport as CompileReport
from shardtorch.aot._report import Event as Event
from shardtorch.aot._report import Memory as Memory
from shardtorch.aot._report import Operation as Operation
from shardtorch.aot._report import StepTime as StepTime
from shardtorch.aot._terminal import show as show
from shardtorch.aot._timeline import to_perfetto as to_perfetto
