#pragma once

// Includes all headers of the library.
#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>
#include <xsoftmax/matcher.h>
#include <xsoftmax/tables.h>
#include <xsoftmax/optim.h>
#include <xsoftmax/samplers.h>
#include <xsoftmax/search.h>
#include <xsoftmax/trees.h>
