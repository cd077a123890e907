#pragma once

// Everything: operators, samplers, losses, optimizers, matchers.
#include <xsoftmax/matcher.h>
#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>
#include <xsoftmax/optim.h>
#include <xsoftmax/samplers.h>
#include <xsoftmax/trees.h>
