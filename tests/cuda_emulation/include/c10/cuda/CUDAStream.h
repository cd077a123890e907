#pragma once
namespace c10::cuda {
/// All that is launched is done at once.
struct CUDAStream {};
inline CUDAStream getCurrentCUDAStream(int = -1) { return {}; }
} // namespace c10::cuda
