// Binds the launchers of pairwise_cosine_cuda.cu to PyTorch tensors.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

extern "C" int pairwise_cosine_forward(const float* e, float* inverse, float* distances, int n, int width,
                                       void* stream);
extern "C" int pairwise_cosine_backward(const float* e, const float* inverse, const float* grad, float* d_e, int n,
                                        int width, void* stream);

static void check(const torch::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous() && tensor.dim() == 2, name,
              " must be a contiguous CUDA matrix");
  TORCH_CHECK(tensor.scalar_type() == torch::kFloat32, name, " must be float32");
}

static std::vector<torch::Tensor> forward(const torch::Tensor& e) {
  check(e, "e");
  const c10::cuda::CUDAGuard guard(e.device());
  auto distances = torch::empty({e.size(0), e.size(0)}, e.options());
  auto inverse = torch::empty({e.size(0)}, e.options());
  const int error = pairwise_cosine_forward(e.data_ptr<float>(), inverse.data_ptr<float>(),
                                            distances.data_ptr<float>(), static_cast<int>(e.size(0)),
                                            static_cast<int>(e.size(1)), c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(error == 0, "pairwise_cosine_forward: CUDA error ", error);
  return {distances, inverse};
}

static torch::Tensor backward(const torch::Tensor& e, const torch::Tensor& inverse, const torch::Tensor& grad) {
  check(e, "e");
  check(grad, "grad");
  const c10::cuda::CUDAGuard guard(e.device());
  auto d_e = torch::empty_like(e);
  const int error = pairwise_cosine_backward(e.data_ptr<float>(), inverse.data_ptr<float>(), grad.data_ptr<float>(),
                                             d_e.data_ptr<float>(), static_cast<int>(e.size(0)),
                                             static_cast<int>(e.size(1)),
                                             c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(error == 0, "pairwise_cosine_backward: CUDA error ", error);
  return d_e;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
}
