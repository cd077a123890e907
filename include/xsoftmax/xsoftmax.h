#pragma once

// Everything: operators, samplers, losses, optimizers.
#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>
#include <xsoftmax/optim.h>
#include <xsoftmax/samplers.h>
#include <xsoftmax/trees.h>
