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

inline const Kernels* table(const char* name) {
  static const Kernels kernels = {
      name,         attend_scratch, attend_task,  rows_task,       rows_merge,   mass_scratch,   mass_task,
      slots_scratch, slots_task,    covariance_scratch, covariance_task, mix_task,
      assign_scratch, assign_task,  means_task,   project_scratch, project_task, affine_scratch, affine_task,
      eigh_scratch, eigh_task,      fit_scratch,  fit_task,
      matmul_scratch, matmul_task,  directions_scratch, directions_task, peaks_task, moment_scratch, moment_rows,  moment_task,
      all_finite,   distances,
  };
  return &kernels;
}

}  // namespace residua::RESIDUA_ISA
