// cuBLAS: handles keep their settings; products are counted and not computed. Other routines are generated.
#include <cublas_v2.h>

#include "library_launch.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

namespace {

cublasStatus_t launch(cublasHandle_t handle, const char* routine) {
  return simulator::launch_in_library(routine, handle->stream) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t math) {
  handle->math = math;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* math) {
  *math = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = handle->pointers;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }

// --- products ------------------------------------------------------------------------------------
// The arguments of all routines are alike but for the type of the elements; none is looked at.

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*, cudaDataType, int, const void*,
                            cudaDataType, int, const void*, void*, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) {
  return launch(handle, "cublasGemmEx");
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*, cudaDataType, int,
                                          long long, const void*, cudaDataType, int, long long, const void*, void*, cudaDataType, int, long long, int,
                                          cublasComputeType_t, cublasGemmAlgo_t) {
  return launch(handle, "cublasGemmStridedBatchedEx");
}

#define PRODUCTS(letter, T)                                                                                                                        \
  cublasStatus_t cublas##letter##gemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const T*, const T*, int,      \
                                         const T*, int, const T*, T*, int) {                                                                       \
    return launch(handle, "cublas" #letter "gemm");                                                                                                \
  }                                                                                                                                                \
  cublasStatus_t cublas##letter##gemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const T*,          \
                                                    const T*, int, long long, const T*, int, long long, const T*, T*, int, long long, int) {       \
    return launch(handle, "cublas" #letter "gemmStridedBatched");                                                                                  \
  }                                                                                                                                                \
  cublasStatus_t cublas##letter##gemv_v2(cublasHandle_t handle, cublasOperation_t, int, int, const T*, const T*, int, const T*, int, const T*, T*, \
                                         int) {                                                                                                    \
    return launch(handle, "cublas" #letter "gemv");                                                                                                \
  }
PRODUCTS(S, float)
PRODUCTS(D, double)
PRODUCTS(C, cuComplex)
PRODUCTS(Z, cuDoubleComplex)
#undef PRODUCTS

cublasStatus_t cublasDotEx(cublasHandle_t handle, int, const void*, cudaDataType, int, const void*, cudaDataType, int, void*, cudaDataType, cudaDataType) {
  return launch(handle, "cublasDotEx");
}

cublasStatus_t cublasSdot_v2(cublasHandle_t handle, int, const float*, int, const float*, int, float*) { return launch(handle, "cublasSdot"); }
cublasStatus_t cublasDdot_v2(cublasHandle_t handle, int, const double*, int, const double*, int, double*) { return launch(handle, "cublasDdot"); }

} // extern "C"
