// Fills the table of kernels for the instruction set of the including file.
#pragma once
#include "attend.h"
#include "covariance.h"
#include "directions.h"
#include "eigen.h"
#include "fit.h"
#include "kmeans.h"
#include "linear.h"
#include "mass.h"
#include "matmul.h"
#include "means.h"
#include "moment.h"
#include "peaks.h"
#include "rows.h"
#include "slots.h"

namespace residua::RESIDUA_ISA {

// A kernel of the list is the function of that name in this name space.
inline const Kernels* table(const char* isa) {
#define RESIDUA_FILL(result, kernel, arguments) , kernel
  static const Kernels kernels = {isa RESIDUA_KERNELS(RESIDUA_FILL)};
#undef RESIDUA_FILL
  return &kernels;
}

}  // namespace residua::RESIDUA_ISA
