#define RESIDUA_ISA generic
#include "kernels.h"
const residua::Kernels* residua::kernels_generic() { return generic::table("generic"); }
