# Installs PyTorch and writes its version to /torch.txt, which pins it for all that follows.
# Usage: torch.sh cpu|cuda [INDEX]; a wheel in /wheels comes first, for cpu.
set -eu
device=$1 index=${2:-}
if [ "$device" = cpu ] && ls /wheels/torch-*.whl > /dev/null 2>&1; then
  pip install -q --no-deps --no-index --find-links /wheels torch
else
  pip install -q --no-deps ${index:+--index-url "$index"} torch
fi
version=$(python3 -c "from importlib.metadata import version; print(version('torch'))")
libraries=$(python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch/lib
if [ "$device" = cpu ] && ls "$libraries"/libtorch_cuda* > /dev/null 2>&1; then
  echo "torch $version is a CUDA build, and this is the CPU image: put PyTorch's CPU wheel into docker/wheels (or name" >&2
  echo "its folder in WHEELS), or set TORCH_INDEX to PyTorch's index of CPU wheels; DEVICE=cuda builds a GPU image" >&2
  exit 1
fi
echo "torch==$version" > /torch.txt
