#pragma once
namespace c10::cuda {
/// Launches run immediately.
struct CUDAStream {};
inline CUDAStream getCurrentCUDAStream(int = -1) { return {}; }
} // namespace c10::cuda
