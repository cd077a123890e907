// C++ samplers that do not follow the class table: agreement with the operators on one seed, state
// names of the Python modules, errors.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <xsoftmax/sampler.h>
#include <xsoftmax/static_samplers.h>

#include <cmath>
#include <set>
#include <sstream>

namespace {

using torch::Tensor;
using namespace xsoftmax::samplers;
using xsoftmax::Proposal;

constexpr int64_t kClasses = 40, kQueries = 5;

at::Generator generator(uint64_t seed) {
  at::Generator made = at::detail::createCPUGenerator();
  made.set_current_seed(seed);
  return made;
}

using Draws = std::tuple<Tensor, Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

class Samplers : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }

  // Returns the draws of Python's sampler: the same operator on tables from the same operator.
  Draws expected(const std::string& owner, const MaybeTensor& weights, std::optional<double> power,
                 const MaybeTensor& classes, const std::string& text) {
    static const auto make = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("xsoftmax::static_tables", "")
                                 .typed<std::tuple<std::vector<Tensor>, std::string>(
                                     std::string, const MaybeTensor&, std::optional<double>,
                                     const MaybeTensor&, std::string_view)>();
    static const auto draw = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("xsoftmax::static_sample", "")
                                 .typed<Draws(const Tensor&, const Tensor&, const MaybeTensor&,
                                              at::TensorList, std::string_view)>();
    const auto [tables, options] = make.call(owner, weights, power, classes, text);
    const Tensor seed =
        torch::randint(0, std::numeric_limits<int64_t>::max(), {}, generator(7), torch::kLong);
    return draw.call(seed, queries, target, tables, options);
  }

  Tensor queries = torch::zeros({kQueries, 3});
  Tensor target = torch::tensor({3, -1, 39, 0, 3}, torch::kLong);
  Tensor counts = torch::arange(1, kClasses + 1);
  Tensor all = torch::arange(kClasses);
};

TEST_F(Samplers, DrawsAreThoseOfTheOperators) {
  const Tensor scattered = torch::tensor({30, 2, 17}, torch::kLong);
  const std::string shared = ",num_samples=7,num_classes=40",
                    apart = shared + ",shared=false,distinct=false";
  const std::vector<std::pair<std::shared_ptr<SamplerImpl>, Draws>> cases{
      {UniformSampler(kClasses, 7).ptr(),
       expected("U", {}, {}, {}, "distribution=uniform" + shared)},
      {UniformSampler(kClasses, 7, DrawOptions{.shared = false, .exclude = scattered}).ptr(),
       expected("U", {}, {}, scattered, "distribution=uniform" + apart)},
      {LogUniformSampler(kClasses, 7).ptr(),
       expected("L", {}, {}, {}, "distribution=log_uniform" + shared)},
      {LogUniformSampler(kClasses, 7, DrawOptions{.shared = false}).ptr(),
       expected("L", {}, {}, {}, "distribution=log_uniform" + apart)},
      {UnigramSampler(counts, 7).ptr(),
       expected("G", counts, 0.75, {}, "distribution=table" + shared)},
      {StaticSampler(counts, 7, DrawOptions{.shared = false}).ptr(),
       expected("S", counts, {}, {}, "distribution=table" + apart)},
      {FixedSampler(kClasses, scattered).ptr(),
       expected("F", {}, {}, scattered, "distribution=fixed,num_classes=40")}};
  for (const auto& [sampler, want] : cases) {
    const Proposal sets = sampler->sample(queries, target, generator(7));
    ASSERT_EQ(sets.size(), 1u);
    EXPECT_TRUE(torch::equal(sets[0].ids, std::get<0>(want))) << sampler->name();
    EXPECT_TRUE(torch::equal(sets[0].log_count, std::get<1>(want))) << sampler->name();
    EXPECT_TRUE(torch::equal(sets[0].target_log_count, std::get<2>(want))) << sampler->name();
    EXPECT_TRUE(sets[0].target_log_count[1].isneginf().item<bool>());
    EXPECT_TRUE(torch::equal(sampler->log_count(queries, target), sets[0].target_log_count));
    EXPECT_FALSE(sampler->sample(queries)[0].target_log_count.defined());
    const auto less = sampler->excluding(torch::tensor({0, 39}, torch::kLong));
    EXPECT_TRUE(less->log_count(queries, target)
                    .index_select(0, torch::tensor({2, 3}))
                    .isneginf()
                    .all()
                    .item<bool>())
        << sampler->name();
    EXPECT_EQ(less->shared(), sampler->shared());
  }
}

TEST_F(Samplers, TheBatchCountsWhatItSees) {
  InBatchSampler sampler(kClasses);
  const Proposal sets = sampler->sample(queries, target);
  EXPECT_EQ(sampler->total.item<int64_t>(), 4);
  EXPECT_EQ(sets[0].log_count.isfinite().sum().item<int64_t>(),
            12); // four queries, each with three others
  const Tensor count = sampler->log_count(queries, all).exp();
  EXPECT_TRUE(
      torch::allclose(count.index_select(0, torch::tensor({3, 39})), torch::tensor({1.5, 0.75})));
  sampler->eval();
  sampler->sample(queries, target);
  EXPECT_EQ(sampler->total.item<int64_t>(), 4);
  EXPECT_THROW(sampler->sample(queries), c10::ValueError);
  EXPECT_EQ(sampler->excluding(all), nullptr);
}

TEST_F(Samplers, CountsOfAStreamDecay) {
  StreamingCounts dense(StreamingOptions{.num_ids = kClasses, .half_life = 4.0}),
      open(StreamingOptions{.half_life = 4.0, .buckets = 512});
  const Tensor first = torch::tensor({3, 3, -1, 5, 3}, torch::kLong),
               second = torch::tensor({5, 9, 9, 9}, torch::kLong);
  dense->update(first);
  open->update(first, first.ge(0));
  const Tensor q = dense->forward(second).exp();
  EXPECT_TRUE(torch::allclose(dense->counts(torch::tensor({3, 5, 9, -1})),
                              torch::tensor({1.5, 1.5, 3.0, 0.0}, torch::kDouble)));
  EXPECT_TRUE(torch::allclose(q, torch::tensor({0.25f, 0.5f, 0.5f, 0.5f})));
  open->forward(second + (int64_t(1) << 40));
  EXPECT_TRUE(torch::allclose(open->log_prob(torch::tensor({3, 5}, torch::kLong)).exp(),
                              torch::tensor({0.75f, 0.25f})));
  EXPECT_TRUE(open->log_prob(second).slice(0, 1).isneginf().all().item<bool>());
  dense->eval();
  dense->update(first);
  EXPECT_EQ(dense->seen.item<int64_t>(), 8);
  dense->to(torch::kHalf);
  EXPECT_EQ(dense->count.scalar_type(), torch::kDouble);
  EXPECT_THROW(StreamingCounts(StreamingOptions{.num_ids = 3, .alpha = 0.1}), c10::ValueError);
  EXPECT_THROW(dense->log_prob(all + 1), c10::IndexError);
  StreamingCounts exact(kClasses);
  EXPECT_EQ(exact->named_buffers().size(), 2u);
  EXPECT_EQ(dense->named_buffers().size(), 4u);
}

TEST_F(Samplers, SamplersFollowAStream) {
  const auto counted = [](std::optional<double> half_life) {
    return StreamingCounts(StreamingOptions{.num_ids = kClasses, .half_life = half_life});
  };
  InBatchSampler plain(kClasses), streamed(kClasses, counted({}));
  EXPECT_TRUE(torch::equal(plain->sample(queries, target)[0].target_log_count,
                           streamed->sample(queries, target)[0].target_log_count));
  EXPECT_TRUE(torch::equal(plain->counts, streamed->streaming->count));
  EXPECT_THROW(InBatchSampler(kClasses + 1, counted({})), c10::ValueError);

  const auto made = [&](const Tensor& exclude) {
    return UnigramSampler(counted(30.0), 7, FollowOptions{.refresh_every = 4},
                          DrawOptions{.exclude = exclude});
  };
  UnigramSampler sampler = made({}), loaded = made({}),
                 other = made(torch::tensor({0, 1}, torch::kLong));
  const Tensor before = sampler->log_count(queries, all);
  for (int i = 0; i < 4; ++i) {
    sampler->sample(queries, target, generator(i));
  }
  EXPECT_EQ(sampler->step.item<int64_t>(), 4);
  EXPECT_FALSE(torch::equal(sampler->log_count(queries, all), before));
  torch::serialize::OutputArchive out;
  sampler->save(out);
  std::stringstream file;
  out.save_to(file);
  for (UnigramSampler to : {loaded, other}) {
    torch::serialize::InputArchive in;
    file.seekg(0);
    in.load_from(file);
    to->load(in);
    EXPECT_TRUE(torch::equal(to->streaming->count, sampler->streaming->count));
  }
  EXPECT_EQ(loaded->step.item<int64_t>(), 4);
  EXPECT_EQ(other->step.item<int64_t>(), 0); // tables of other classes: rebuilt
  EXPECT_TRUE(torch::equal(loaded->sample(queries, target, generator(9))[0].log_count,
                           sampler->sample(queries, target, generator(9))[0].log_count));
  const auto less = sampler->excluding(torch::tensor({3}, torch::kLong));
  EXPECT_TRUE(less->log_count(queries, torch::tensor({3}, torch::kLong)).isneginf().item<bool>());
  sampler->eval();
  sampler->sample(queries, target, generator(1));
  EXPECT_EQ(sampler->step.item<int64_t>(), 5);
  EXPECT_THROW(UnigramSampler(StreamingCounts(StreamingOptions{}), 7), c10::ValueError);
  EXPECT_THROW(UnigramSampler(counted({}), 7, FollowOptions{.uniform_share = 0.0}),
               c10::ValueError);
}

TEST_F(Samplers, CountsOfAUnionAddUp) {
  const auto part = [&] {
    return UnigramSampler(counts, 3, 0.75, DrawOptions{.shared = false}).ptr();
  };
  UnionSampler inner(std::vector<std::shared_ptr<SamplerImpl>>{
      part(), FixedSampler(kClasses, all.narrow(0, 0, 2)).ptr()});
  UnionSampler sampler(std::vector<std::shared_ptr<SamplerImpl>>{
      inner.ptr(), UniformSampler(kClasses, 6).ptr(), part(), InBatchSampler(kClasses).ptr()});
  EXPECT_EQ(inner->num_samples(), 5);
  EXPECT_EQ(sampler->num_samples(), SamplerImpl::kOfBatch);
  EXPECT_FALSE(sampler->shared());
  const Proposal sets = sampler->sample(queries, target);
  EXPECT_EQ(sets.size(), 5u);
  const Tensor want = sampler->log_count(queries, all).exp();
  Tensor of_target = torch::zeros({kQueries});
  for (const auto& set : sets) {
    const Tensor ids = set.ids.expand({kQueries, set.ids.size(-1)}),
                 got = set.log_count.exp().expand_as(ids);
    const Tensor expected = want.index_select(0, ids.flatten()).view_as(ids);
    EXPECT_TRUE(torch::allclose(got, torch::where(got.isinf(), got, expected), 1e-4));
    of_target += set.target_log_count.exp();
  }
  const Tensor counted = target.ge(0);
  EXPECT_TRUE(torch::allclose(of_target.masked_select(counted),
                              want.index_select(0, target.masked_select(counted)), 1e-4));
  std::set<std::string> names;
  for (const auto& item : sampler->named_buffers()) names.insert(item.key());
  EXPECT_EQ(names, (std::set<std::string>{"parts.3.counts", "parts.3.total"}));
  EXPECT_EQ(sampler->excluding(all.narrow(0, 0, 1)), nullptr);
  EXPECT_NE(inner->excluding(all.narrow(0, 0, 1)), nullptr);
  EXPECT_THROW(UnionSampler(std::vector<std::shared_ptr<SamplerImpl>>{part(), inner.ptr()}),
               c10::ValueError); // `inner` is already in a union
}

TEST_F(Samplers, ComplementIsOutside) {
  const Tensor inside = torch::tensor({{39, 38, -1}, {0, 5, 7}}), rows = torch::zeros({2, 1});
  const auto weighted = UnigramSampler(counts, 1500, 0.75, DrawOptions{.shared = false}).ptr();
  for (ComplementSampler sampler :
       {ComplementSampler(weighted, 500), ComplementSampler(kClasses, 500)}) {
    const auto drawn =
        sampler->sample_outside(rows, inside, all.expand({2, kClasses}), generator(3));
    EXPECT_TRUE(drawn.ids.unsqueeze(2).ne(inside.unsqueeze(1)).all().item<bool>());
    EXPECT_TRUE(
        torch::allclose(drawn.target_log_count.exp().sum(1), torch::full({2}, 500.0), 1e-4));
    EXPECT_TRUE(torch::allclose(drawn.target_log_count.gather(1, drawn.ids), drawn.log_count));
    const Proposal sets = sampler->sample(queries, target);
    EXPECT_TRUE(sets[0].ids.ne(target.unsqueeze(1)).all().item<bool>());
    EXPECT_THROW(sampler->log_count(queries, all), c10::ValueError);
  }
  EXPECT_THROW(ComplementSampler(UniformSampler(kClasses, 4).ptr(), 2), c10::ValueError);
  EXPECT_THROW(
      ComplementSampler(UniformSampler(kClasses, 5, DrawOptions{.shared = false}).ptr(), 2),
      c10::ValueError);
}

TEST_F(Samplers, Names) {
  const auto sampler = make_sampler(
      "unigram",
      SamplerRequest{.num_classes = kClasses, .num_samples = 5, .shared = false, .counts = counts});
  EXPECT_EQ(sampler->sample(queries)[0].ids.sizes(), (std::vector<int64_t>{kQueries, 5}));
  EXPECT_EQ(make_sampler("in_batch", SamplerRequest{.num_classes = kClasses})->name(),
            "InBatchSampler");
  register_sampler("last", [](const SamplerRequest& request) {
    return FixedSampler(request.num_classes, torch::tensor({request.num_classes - 1})).ptr();
  });
  EXPECT_EQ(make_sampler("last", SamplerRequest{.num_classes = kClasses})
                ->sample(queries)[0]
                .ids.item<int64_t>(),
            39);
  EXPECT_THROW(make_sampler("uniform", SamplerRequest{.num_classes = kClasses}), c10::ValueError);
  EXPECT_THROW(make_sampler("zipf", SamplerRequest{.num_classes = kClasses}), c10::ValueError);
  EXPECT_THROW(register_sampler("uniform", nullptr), c10::ValueError);
}

TEST_F(Samplers, BadArgumentsAreNamed) {
  EXPECT_THROW(UniformSampler(0, 1), c10::ValueError);
  EXPECT_THROW(UniformSampler(5, 6), c10::ValueError);
  EXPECT_THROW(UniformSampler(5, 1, DrawOptions{.exclude = torch::arange(5)}), c10::ValueError);
  EXPECT_THROW(UniformSampler(5, 1, DrawOptions{.exclude = torch::tensor({5})}), c10::IndexError);
  EXPECT_THROW(UnigramSampler(-torch::ones(3), 1), c10::ValueError);
  UniformSampler sampler(5, 2);
  EXPECT_THROW(sampler->sample(queries, torch::full({kQueries}, 5)), c10::IndexError);
  EXPECT_THROW(sampler->log_count(queries, torch::ones({2})), c10::TypeError);
  sampler->claim("SampledSoftmaxLoss");
  EXPECT_THROW(sampler->claim("CaneLoss"), c10::ValueError);
  sampler->to(torch::kHalf); // only devices move
  EXPECT_EQ(sampler->sample(queries)[0].log_count.scalar_type(), torch::kFloat);
}

} // namespace
