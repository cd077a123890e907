#pragma once

// Everything: operators, estimators, samplers, losses, optimizers, ids that come and go, matchers, search, metrics, tables in files.
#include <xsoftmax/cached_step.h>
#include <xsoftmax/estimators.h>
#include <xsoftmax/hierarchical_matcher.h>
#include <xsoftmax/id_table.h>
#include <xsoftmax/long_work.h>
#include <xsoftmax/matcher.h>
#include <xsoftmax/matcher_training.h>
#include <xsoftmax/metrics.h>
#include <xsoftmax/nn.h>
#include <xsoftmax/ops.h>
#include <xsoftmax/optim.h>
#include <xsoftmax/samplers.h>
#include <xsoftmax/search.h>
#include <xsoftmax/tables.h>
#include <xsoftmax/trees.h>
