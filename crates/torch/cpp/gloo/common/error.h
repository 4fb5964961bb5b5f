#pragma once // Nothing of it is used: see gloo/context.h.
