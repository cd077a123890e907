#pragma once

// Precompiled header: headers that most files need, parsed once per build, which saves a third of
// the build time. Files still include what they use.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
