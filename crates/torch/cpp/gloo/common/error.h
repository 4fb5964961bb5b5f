#pragma once // Empty on purpose: see gloo/context.h.
