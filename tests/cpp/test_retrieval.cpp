// Search by an index from C++, compared with the scores of all classes.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/nn.h>
#include <xsoftmax/search.h>

namespace {

using torch::Tensor;

TEST(Retrieval, CertifiedAndLimited) {
  torch::manual_seed(0);
  const auto f64 = torch::kDouble;
  const Tensor centres = 3 * torch::randn({10, 12}),
               weight = centres.repeat({150, 1}) + torch::randn({1500, 12}),
               bias = torch::randn({1500});
  const Tensor input = centres.repeat({4, 1}) / 3, seed = torch::zeros({}, torch::kLong);
  const auto index = xsoftmax::midx_search_index(weight, bias, std::nullopt, std::nullopt, 0, seed);
  EXPECT_EQ(index[2].size(0), 3 * 3 + 1); // sqrt(1500 / 256), rounded up

  const auto [scores, ids, cells, certified] = xsoftmax::search_topk(input, weight, bias, index, 7);
  const auto [want, want_ids] = (input.to(f64).mm(weight.to(f64).t()) + bias.to(f64))
                                    .sort(/*stable=*/true, 1, /*descending=*/true);
  EXPECT_TRUE(torch::equal(ids, want_ids.narrow(1, 0, 7)));
  EXPECT_TRUE(torch::allclose(scores, want.narrow(1, 0, 7).to(torch::kFloat)));
  EXPECT_TRUE(certified.all().item<bool>());

  const auto limited = xsoftmax::search_topk(input, weight, bias, index, 7, "max_cells=2");
  EXPECT_LE(std::get<2>(limited).max().item<int64_t>(), 2);
  const Tensor right = std::get<1>(limited).eq(ids).all(1);
  EXPECT_TRUE((right | ~std::get<3>(limited)).all().item<bool>());

  const int64_t budget =
      xsoftmax::search_budget(input, weight, bias, index, 7, 0.9).item<int64_t>();
  const Tensor found = std::get<1>(
      xsoftmax::search_topk(input, weight, bias, index, 7, "max_cells=" + std::to_string(budget)));
  EXPECT_GE(found.unsqueeze(2).eq(ids.unsqueeze(1)).any(2).to(f64).mean().item<double>(), 0.9);
}

TEST(Retrieval, IndicesMove) {
  const Tensor weight = torch::randn({300, 5}), bias = torch::randn({300}),
               input = torch::randn({4, 5});
  xsoftmax::SearchIndex index(weight, bias);
  xsoftmax::SearchIndex moved = index.to(torch::kMeta), same = index.to(torch::kCPU);
  EXPECT_TRUE(moved.tensors()[0].is_meta());
  EXPECT_TRUE(torch::equal(same.search(input, 3).ids, index.search(input, 3).ids));
  EXPECT_THROW(moved.search(input, 3), c10::TypeError);
}

TEST(Retrieval, Errors) {
  const Tensor weight = torch::randn({20, 3}), input = torch::randn({2, 3}),
               seed = torch::zeros({}, torch::kLong);
  const auto index =
      xsoftmax::midx_search_index(weight, std::nullopt, std::nullopt, std::nullopt, 2, seed);
  EXPECT_THROW(xsoftmax::search_topk(input, weight, std::nullopt, index, 21), c10::ValueError);
  EXPECT_THROW(xsoftmax::search_topk(input, weight, std::nullopt, index, 2, "max_cells=0"),
               c10::ValueError);
  EXPECT_THROW(xsoftmax::search_topk(input, weight, torch::zeros({20}), index, 2),
               c10::ValueError); // the index has no bias
  EXPECT_THROW(
      xsoftmax::midx_search_index(weight / 0, std::nullopt, std::nullopt, std::nullopt, 2, seed),
      c10::ValueError);
}

} // namespace
