#pragma once
template <typename T>
T gpuAtomicAdd(T* at, std::type_identity_t<T> x) {
  return atomicAdd(at, x);
}
template <typename T>
void gpuAtomicAddNoReturn(T* at, std::type_identity_t<T> x) {
  atomicAdd(at, x);
}
