#define RESIDUA_ISA portable
#include "kernels.h"
const residua::Kernels* residua::kernels_portable() { return portable::table("portable"); }
