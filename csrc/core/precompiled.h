#pragma once

// The headers that nearly every file needs, parsed once a build. Files still include what they use.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
